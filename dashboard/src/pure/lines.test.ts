import assert from "node:assert/strict";
import { test } from "vitest";

import { linesOf } from "./lines.ts";

test("pieces fill lines in order and none is lost", () => {
  assert.deepEqual(linesOf([3, 3, 3, 20, 1], 7), [
    { from: 0, to: 2 },
    { from: 2, to: 3 },
    { from: 3, to: 4 },
    { from: 4, to: 5 },
  ]);
  assert.deepEqual(linesOf([], 7), []);
});

test("a line ends where a part ends, and a part that begins the line breaks nothing", () => {
  assert.deepEqual(linesOf([1, 1, 1, 1], 9, new Set([0, 1, 3])), [
    { from: 0, to: 1 },
    { from: 1, to: 3 },
    { from: 3, to: 4 },
  ]);
});
