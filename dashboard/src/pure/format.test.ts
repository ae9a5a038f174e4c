import assert from "node:assert/strict";
import { test } from "node:test";

import { ago, bytes, decimal, duration, moment, pValue, percent } from "./format.ts";

test("a duration says its units at every size", () => {
  assert.equal(duration(0.84), "840 ms");
  assert.equal(duration(0.9999), "1.0 s");
  assert.equal(duration(59.96), "1 min 00 s");
  assert.equal(duration(245), "4 min 05 s");
  assert.equal(duration(7380), "2 h 03 min");
  assert.equal(duration(3 * 86400 + 4 * 3600), "3 d 04 h");
  assert.equal(duration(null), "–");
});

test("numbers keep what matters", () => {
  assert.equal(decimal(0.85937), "0.859");
  assert.equal(decimal(-1), "-1");
  assert.equal(decimal(0.00001), "1.00e-5");
  assert.equal(decimal(Number.NaN), "–");
  assert.equal(percent(0.8594), "85.9 %");
  assert.equal(pValue(1e-46), "p < 0.001");
  assert.equal(bytes(999), "999 B");
  assert.equal(bytes(17_252_352), "17 MB");
});

test("moments follow the chosen time zone", () => {
  assert.equal(moment(0, "UTC"), "1970-01-01 00:00:00");
  assert.equal(moment(0, "Asia/Tokyo", false), "09:00:00");
  assert.equal(ago(100, 220), "2 min 00 s ago");
});
