import assert from "node:assert/strict";
import { test } from "vitest";

import { cell, csvLine } from "./table.ts";

test("a cell keeps its text and never becomes a formula", () => {
  assert.equal(cell('=HYPERLINK("http://x")'), '"\'=HYPERLINK(""http://x"")"');
  assert.equal(cell(-1.5), "-1.5");
  assert.equal(cell("-1"), "'-1");
  assert.equal(cell({ a: 1 }), '"{""a"":1}"');
  assert.equal(csvLine(["a,b", null, "two\nlines"]), '"a,b",,"two\nlines"\r\n');
});
