import assert from "node:assert/strict";
import { test } from "vitest";

import type { LedgerCall, LedgerRow } from "../api/types.ts";
import { unpack } from "./packed.ts";
import { colourOf, rangeOf, shownToken, tokensOf, valueOf } from "./tokenRows.ts";

function pack(dtype: "i32" | "u8" | "f32", values: number[]) {
  const bytes =
    dtype === "u8"
      ? new Uint8Array(values)
      : new Uint8Array((dtype === "i32" ? new Int32Array(values) : new Float32Array(values)).buffer);
  return { dtype, data: Buffer.from(bytes).toString("base64") };
}

const call = (tokens: number, row: number | null, ending: "trained" | "excluded" = "trained"): LedgerCall => ({
  call_id: "c", attempt_id: "a", ending, reason: null, row, tokens, advantage: 0.5, weight_version: 1,
}); // prettier-ignore

const row: LedgerRow = {
  row: 4,
  vocabulary: "v",
  length: 6,
  tokens: pack("i32", [10, 11, 12, 13, 14, -1]),
  mask: pack("u8", [0, 1, 1, 0, 1, 0]),
  engine_logprobs: pack("f32", [-0.5, -2, -1]),
  trainer_logprobs: pack("f32", [-0.5, -1.5, -1]),
  ratio: pack("f32", [1, 2, 0.5]),
};

test("figures go to the trained tokens, in order, and calls to their answers", () => {
  const tokens = tokensOf(row, [call(9, 3), call(2, 4), call(1, null, "excluded"), call(1, 4)]);
  assert.deepEqual(
    tokens.map((token) => token.id),
    [10, 11, 12, 13, 14, -1],
  );
  assert.deepEqual(
    tokens.map((token) => token.call),
    [-1, 1, 1, -1, 3, -1],
  );
  assert.equal(tokens[2]?.figures.engine_logprobs, -2);
  assert.deepEqual(tokens[0]?.figures, {});
  assert.equal(valueOf(tokens[2], "difference"), 0.5);
  assert.equal(valueOf(tokens[0], "logprob"), null);
  assert.equal(valueOf(tokens[4]!, "ratio"), Math.log(0.5));
});

test("what is no array of the ledger has no numbers", () => {
  for (const value of [null, undefined, 3, "x", {}, { dtype: "f64", data: "AA==" }, { dtype: "u8", data: "%%" }]) {
    assert.deepEqual(unpack(value), []);
  }
  assert.deepEqual(tokensOf({ row: 0, vocabulary: null, length: 0 }, []), []);
});

test("a diverging scale is as wide below zero as above, and colours differ by direction", () => {
  const tokens = tokensOf(row, [call(3, 4)]);
  const range = rangeOf(tokens, "ratio");
  assert.equal(range[0], -range[1]);
  assert.notEqual(colourOf(range[0], range, "ratio"), colourOf(range[1], range, "ratio"));
  assert.equal(colourOf(null, range, "ratio"), null);
  assert.deepEqual(rangeOf([], "entropy"), [0, 0]);
});

test("white space is seen, and a token without text shows its number", () => {
  assert.equal(shownToken(" a\n", 1), "·a⏎");
  assert.equal(shownToken(null, 7), "#7");
  assert.equal(shownToken("", 7), "∅");
});

test("a token's text cannot turn its neighbours round", () => {
  assert.equal(shownToken("a\u202e b", 1), "a⟨U+202E⟩·b");
});

test("divergence from the reference colours like a figure of its own, and none of it is the palest", () => {
  const tokens = tokensOf({ ...row, kl: pack("f32", [0, 0.5, 0]) }, [call(3, 4)]);
  const range = rangeOf(tokens, "kl");
  assert.deepEqual(range, [0, 0.5]);
  assert.notEqual(colourOf(valueOf(tokens[1]!, "kl"), range, "kl"), colourOf(valueOf(tokens[2]!, "kl"), range, "kl"));
  assert.equal(colourOf(0, [0, 0], "kl"), "rgb(255 247 236)");
});
