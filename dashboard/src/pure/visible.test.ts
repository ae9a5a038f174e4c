import assert from "node:assert/strict";
import { test } from "vitest";

import { visible } from "./visible.ts";

test("characters that hide or turn text around are shown by their numbers", () => {
  assert.equal(visible("a\u202eb\u0000"), "a⟨U+202E⟩b⟨U+0000⟩");
  assert.equal(visible("line\n\ttab <script>"), "line\n\ttab <script>");
  assert.equal(visible("\ud800x"), "\ufffdx");
});

test("joiners stay where an emoji or a script is written with them, and nowhere else", () => {
  for (const text of ["👩‍👧‍👦", "🏳️‍🌈", "👩🏽‍🚀", "می‌خواهم", "क्‍ष"]) assert.equal(visible(text), text);
  assert.equal(visible("a\u200db\u200cc 🙂\u200d"), "a⟨U+200D⟩b⟨U+200C⟩c 🙂⟨U+200D⟩");
});
