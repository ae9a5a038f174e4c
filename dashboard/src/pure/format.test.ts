import assert from "node:assert/strict";
import { test } from "vitest";

import {
  ago,
  bytes,
  counted,
  decimal,
  duration,
  inputWords,
  isoTime,
  moment,
  pValue,
  percent,
  ticks,
} from "./format.ts";

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

test("one thing is no plural", () => {
  assert.equal(counted(1, "rollout"), "1 rollout");
  assert.equal(counted(0, "run"), "0 runs");
  assert.equal(counted(1200, "run"), "1,200 runs");
  assert.equal(counted(null, "token"), "– tokens");
});

test("a time in a file has its time zone", () => {
  assert.equal(isoTime(1_790_000_000.25), "2026-09-21T14:13:20.250Z");
  assert.equal(isoTime(null), null);
});

test("numbers along an axis differ", () => {
  assert.deepEqual(ticks([0, 0.0001, 0.0002]), ["0", "0.0001", "0.0002"]);
  assert.deepEqual(ticks([0, 0.25, 0.5]), ["0", "0.25", "0.5"]);
  assert.deepEqual(ticks([0, 2e-9, 4e-9]), ["0", "2e-9", "4e-9"]);
  assert.deepEqual(ticks([-500, 0, 1500]), ["-500", "0", "1,500"]);
});

test("an input is shown in words, also where its JSON is cut", () => {
  assert.equal(inputWords('{"question": "A \\"room\\"?"}'), 'A "room"?');
  assert.equal(inputWords('{"question": "A room for se'), "A room for se");
  assert.equal(inputWords('{"question": "A room", "level": 3}'), "A room, level: 3");
  assert.equal(inputWords("plain text"), "plain text");
  assert.equal(inputWords("[1, 2]"), "[1, 2]");
});

test("moments follow the chosen time zone", () => {
  assert.equal(moment(0, "UTC"), "1970-01-01 00:00:00");
  assert.equal(moment(0, "Asia/Tokyo", false), "09:00:00");
  assert.equal(ago(100, 220), "2 min 00 s ago");
});
