import assert from "node:assert/strict";
import { test } from "vitest";

import { filterOf } from "./filters.ts";

test("the address says what the store is asked for", () => {
  assert.deepEqual(
    filterOf({ run: "r", status: "failed,running,nonsense", step_from: "2", reward_to: "0.5", text: "a b", task: "7" }),
    { run_id: "r", status_in: ["failed", "running"], step_from: 2, reward_to: 0.5, input_contains: "a b", task: 7 },
  );
  assert.deepEqual(filterOf({ task: "seven", mode: "train" }), { mode_in: ["train"], task: "seven" });
});

test("what is no value is left out", () => {
  assert.deepEqual(
    filterOf({ step_from: "x", step_to: "1.5", reward_from: "", status: "nonsense", sort: "reward" }),
    {},
  );
});
