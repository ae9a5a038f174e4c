import assert from "node:assert/strict";
import { test } from "vitest";

import { href, parseSearch, stringifySearch } from "./address.ts";

test("what is written is read again, whatever it holds", () => {
  const values = { run: "a/b?c&d=e #f", text: "<script>", step_from: "3", empty: "" };
  const { empty: _, ...kept } = values;
  assert.deepEqual(parseSearch(stringifySearch(values)), kept);
  assert.equal(stringifySearch({ a: undefined, b: null }), "");
});

test("a link escapes what it names", () => {
  assert.equal(href(["runs", "a/b", 3], { before: "x:1" }), "#/runs/a%2Fb/3?before=x%3A1");
});
