import assert from "node:assert/strict";
import { test } from "vitest";

import { foldedPieces, wordDiff, type Piece } from "./words.ts";

const side = (pieces: Piece[], without: Piece["kind"]): string =>
  pieces
    .filter(({ kind }) => kind !== without)
    .map(({ text }) => text)
    .join("");

test("what changed is found by words, and both texts can be read off it", () => {
  const pieces = wordDiff("Answer the question. Be brief.", "Answer this question. Be very brief!");
  assert.deepEqual(
    pieces.filter(({ kind }) => kind === "removed").map(({ text }) => text),
    ["the", "."],
  );
  assert.equal(side(pieces, "added"), "Answer the question. Be brief.");
  assert.equal(side(pieces, "removed"), "Answer this question. Be very brief!");
});

test("empty, equal and very long texts", () => {
  assert.deepEqual(wordDiff("", ""), []);
  assert.deepEqual(wordDiff("a b", "a b"), [{ kind: "same", text: "a b" }]);
  assert.deepEqual(wordDiff("", "<b>"), [{ kind: "added", text: "<b>" }]);
  const long = wordDiff(`x${" a".repeat(3000)} y`, `x${" b".repeat(3000)} y`);
  assert.equal(side(long, "removed"), `x${" b".repeat(3000)} y`);
  assert.equal(long.at(-1)?.text, " y");
});

test("a long text is folded between its ends, a short one is whole, and its changes stay", () => {
  const short = wordDiff("a b", "a c");
  assert.deepEqual(foldedPieces(short), short);
  const long = foldedPieces(wordDiff(`${"same ".repeat(20_000)}old`, `${"same ".repeat(20_000)}naïve 🙂`));
  assert.deepEqual(
    long.slice(1).map(({ kind, text }) => [kind, text]),
    [
      ["removed", "old"],
      ["added", "naïve 🙂"],
    ],
  );
  assert.match(long[0]?.text ?? "", /^same same [^…]*… 99,400 characters not shown …[^…]*same $/);
  assert.ok((foldedPieces([{ kind: "same", text: "x".repeat(1_000_000) }])[0]?.text.length ?? 0) < 10_100);
});
