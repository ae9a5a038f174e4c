import assert from "node:assert/strict";
import { test } from "vitest";

import type { TokenAt } from "./tokenRows.ts";
import { histogramOf, partsOf, statisticsOf } from "./tokenStatistics.ts";

test("statistics leave out what is no number, and say nothing of nothing", () => {
  assert.deepEqual(statisticsOf([3, null, 1, Number.NaN, 2, 6]), { count: 4, mean: 3, low: 1, high: 6, median: 2.5 });
  assert.equal(statisticsOf([null, Number.NaN]), null);
});

test("each value is in one part of the histogram, the greatest in the last", () => {
  assert.deepEqual(histogramOf([0, 1, 4, null, 2], [0, 4], 4), [1, 1, 1, 1]);
  assert.deepEqual(histogramOf([5, 5, 5], [5, 5], 3), [3, 0, 0]);
  assert.deepEqual(histogramOf([-1, 9], [0, 4], 2), [0, 0]);
});

test("a row is in parts: what was given, and each call's answer", () => {
  const calls = [-1, 0, 0, -1, 1, 2];
  const tokens = calls.map((call, at): TokenAt => ({ at, id: at, trained: call >= 0, place: -1, call, figures: {} }));
  assert.deepEqual(partsOf(tokens), [
    { from: 0, to: 1, call: -1, trained: false },
    { from: 1, to: 3, call: 0, trained: true },
    { from: 3, to: 4, call: -1, trained: false },
    { from: 4, to: 5, call: 1, trained: true },
    { from: 5, to: 6, call: 2, trained: true },
  ]);
  assert.deepEqual(partsOf([]), []);
});
