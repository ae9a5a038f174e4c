import assert from "node:assert/strict";
import { test } from "vitest";

import type { SpanNode } from "../api/types.ts";
import { criticalPath, gapsOf, kindOf, moved, rowsOf, timesOf, zoomed } from "./waterfall.ts";

function node(
  id: string,
  start: number | null,
  end: number | null,
  children: SpanNode[] = [],
  more: Partial<SpanNode> = {},
): SpanNode {
  return {
    span_id: id,
    name: id,
    start_time: start,
    end_time: end,
    status_code: "OK",
    sequence_id: 0,
    agent: null,
    reward: null,
    children,
    ...more,
  };
}

const tree = [node("b", 5, null), node("a", 1, 4, [node("a2", 3, 4), node("a1", 1, 2, [node("deep", 1, 1.5)])])];

test("rows come by time, parents first, and closed ones hide what is below", () => {
  const rows = rowsOf(tree, new Set());
  assert.deepEqual(
    rows.map(({ span, depth }) => [span.span_id, depth]),
    [
      ["a", 0],
      ["a1", 1],
      ["deep", 2],
      ["a2", 1],
      ["b", 0],
    ],
  );
  assert.deepEqual(
    rows.map((row) => row.below),
    [3, 1, 0, 0, 0],
  );
  assert.deepEqual(
    rows.map((row) => row.parent),
    [-1, 0, 1, 0, -1],
  );
  assert.deepEqual(
    rowsOf(tree, new Set(["a"])).map(({ span }) => span.span_id),
    ["a", "b"],
  );
});

test("a span that has not ended reaches to now", () => {
  assert.deepEqual(timesOf(rowsOf(tree, new Set()), 9), [1, 9]);
  assert.deepEqual(timesOf([], 9), [0, 1]);
});

test("a chain of ten thousand spans is no trouble", () => {
  let chain = node("end", 0, 1);
  for (let at = 0; at < 10_000; at += 1) chain = node(`n${at}`, 0, 1, [chain]);
  assert.equal(rowsOf([chain], new Set()).length, 10_001);
});

test("kinds are told by reward, name and agent", () => {
  assert.equal(kindOf(node("litellm_request", 0, 1)), "call");
  assert.equal(kindOf(node("x", 0, 1, [], { reward: 0 })), "reward");
  assert.equal(kindOf(node("x", 0, 1, [], { agent: "a" })), "agent");
  assert.equal(kindOf(node("virtual-x", 0, 1)), "virtual");
});

test("the critical path follows what ends last", () => {
  assert.deepEqual([...criticalPath(rowsOf([tree[1]!], new Set()))], ["a", "a2"]);
});

test("gaps are where no call, no tool and nothing without children ran, and small ones are none", () => {
  const call = rowsOf(node("root", 0, 100, [node("chat", 0, 90, [node("x", 40, 50)])]).children, new Set());
  assert.deepEqual(gapsOf(call, 0, 100, 100), [[90, 100]]);
  const rows = rowsOf(
    [node("root", 0, 100, [node("a", 10, 20), node("b", 19, 40), node("c", 41, 60), node("d", 90, null)])],
    new Set(),
  );
  assert.deepEqual(gapsOf(rows, 0, 100, 100), [
    [0, 10],
    [60, 90],
  ]);
  assert.deepEqual(gapsOf([], 0, 1, 1), [[0, 1]]);
});

test("a part of the time is zoomed and moved within the whole", () => {
  assert.deepEqual(zoomed([0, 100], 0.5, [0, 100]), [25, 75]);
  assert.deepEqual(zoomed([0, 10], 4, [0, 100]), [0, 40]);
  assert.deepEqual(zoomed([20, 80], 10, [0, 100]), [0, 100]);
  assert.deepEqual(moved([25, 75], 1, [0, 100]), [50, 100]);
  assert.deepEqual(moved([25, 75], -1, [0, 100]), [0, 50]);
});
