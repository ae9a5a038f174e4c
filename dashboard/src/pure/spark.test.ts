import assert from "node:assert/strict";
import { test } from "vitest";

import { sparkPath, thinned } from "./spark.ts";

test("a curve fills its box and leaves gaps out", () => {
  assert.equal(sparkPath([0, null, 1], 10, 10), "M1.0 9.0L9.0 1.0");
  assert.equal(sparkPath([1], 10, 10), "");
  assert.equal(sparkPath([2, 2], 10, 10), "M1.0 5.0L9.0 5.0");
  assert.equal(sparkPath([Number.NaN, 1], 10, 10), "");
});

test("a long curve is thinned by means", () => {
  assert.deepEqual(thinned([1, 3, 5, 7], 2), [2, 6]);
  assert.deepEqual(thinned([null, null, 5, 7], 2), [null, 6]);
  assert.equal(
    thinned(
      Array.from({ length: 10_001 }, () => 1),
      100,
    ).length,
    100,
  );
});
