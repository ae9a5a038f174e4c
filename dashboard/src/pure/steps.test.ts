import assert from "node:assert/strict";
import { test } from "vitest";

import type { RunRecord } from "../api/types.ts";
import { alarmsOf, figure, interval, ledgerOf, limits, meanInterval, reasonsOf } from "./steps.ts";

test("a figure is found below its names, and is a number or nothing", () => {
  assert.equal(figure({ update: { loss: 0.5 } }, "update.loss"), 0.5);
  assert.equal(figure({ update: null }, "update.loss"), null);
  assert.equal(figure({ a: "1" }, "a"), null);
});

test("a ledger that does not add up says by how much", () => {
  const bar = ledgerOf({ calls_captured: 10, calls_trained: 4, calls_excluded: { equal_rewards: 5 } });
  assert.equal(bar.missing, 1);
  assert.deepEqual(reasonsOf([bar, ledgerOf({ calls_excluded: { stale: 9 } })]), ["stale", "equal_rewards"]);
});

test("an interval of shares stays within 0 and 1", () => {
  const [mean, low, high] = meanInterval([1, 1, 1, null]) ?? [0, 0, 0];
  assert.equal(mean, 1);
  assert.ok(low !== null && low > 0.4 && low < 0.45 && high === 1);
  assert.equal(meanInterval([null]), null);
});

test("an interval is that of the evaluation in Python", () => {
  const rounded = (rewards: number[]) => meanInterval(rewards)?.map((value) => value && Number(value.toFixed(3)));
  assert.deepEqual(rounded([0.2, 0.5]), [0.35, 0, 1]);
  assert.deepEqual(rounded([0.5, 0.5, 0.5, 0.5]), [0.5, 0.15, 0.85]);
  assert.deepEqual(rounded([0.1, 0.2, 0.3, 0.4]), [0.25, 0.045, 0.455]);
  assert.deepEqual(rounded([2, 2]), [2, null, null]);
  assert.deepEqual(rounded([0.5]), [0.5, null, null]);
  const group = { mean: 0.25, stderr: 0.25, scored: 4, minimum: 0, maximum: 1 };
  assert.equal(limits(interval(group)), "95 % interval 0.046 to 0.699");
});

test("an alarm lasts until it is over", () => {
  const record = (step: number, data: Record<string, unknown>): RunRecord => ({
    kind: "alarm",
    step,
    name: "entropy_collapse",
    data,
    time: 0,
  });
  const alarms = alarmsOf([
    record(3, { state: "raised", since: 3, text: "low", what_to_try: "more" }),
    record(5, { state: "over", since: 3 }),
    record(8, { state: "raised", since: 8, text: "low again" }),
    { ...record(9, { text: "once" }), name: "update" },
  ]);
  assert.deepEqual(
    alarms.map(({ from, until, lasts }) => [from, until, lasts]),
    [
      [3, 5, false],
      [8, null, true],
      [9, null, false],
    ],
  );
});
