import assert from "node:assert/strict";
import { test } from "vitest";

import { serverNow, setServerTime } from "./clock.ts";

test("a browser whose clock is an hour behind counts as the server does", () => {
  assert.equal(serverNow(100), 100);
  setServerTime(3700.5, 100, 101);
  assert.equal(serverNow(200), 3800);
  setServerTime(100.5, 100, 101);
  assert.equal(serverNow(200), 200);
});
