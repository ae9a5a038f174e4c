/** The tokens of a row with what the loss used of each, as the ledger has them. */

import type { LedgerCall, LedgerRow } from "../api/types.ts";
import { unpack } from "./packed.ts";
import { visible } from "./visible.ts";

/** Figures that the ledger may have of a trained token, and what they are called. */
export const FIGURES = {
  engine_logprobs: "log-probability (engine)",
  trainer_logprobs: "log-probability (trainer)",
  entropy: "entropy (nats)",
  advantage: "advantage",
  ratio: "ratio",
  clipped: "clipped",
  weight: "weight in the loss",
  correction: "correction",
  kl: "KL to the reference",
} as const;

export type Figure = keyof typeof FIGURES;

export interface TokenAt {
  /** Place in the row, from 0. */
  at: number;
  id: number;
  trained: boolean;
  /** Place among the trained tokens of the row; -1 for others. */
  place: number;
  /** Index of the call whose answer it is; -1 for tokens of a prompt. */
  call: number;
  figures: Partial<Record<Figure, number>>;
}

/** Trained tokens belong to the calls of the row in order, as many to each as the ledger says. */
export function tokensOf(row: LedgerRow, calls: readonly LedgerCall[]): TokenAt[] {
  const ids = unpack(row.tokens);
  const mask = unpack(row.mask);
  const figures = (Object.keys(FIGURES) as Figure[])
    .map((name) => [name, unpack(row[name])] as const)
    .filter(([, values]) => values.length > 0);
  const own = calls
    .map((call, index) => ({ call, index }))
    .filter(({ call }) => call.row === row.row && call.ending === "trained");
  const ends: { until: number; index: number }[] = [];
  let sum = 0;
  for (const { call, index } of own) {
    sum += call.tokens;
    ends.push({ until: sum, index });
  }
  let place = -1;
  return ids.map((id, at) => {
    const trained = mask[at] === 1;
    if (trained) place += 1;
    return {
      at,
      id,
      trained,
      place: trained ? place : -1,
      call: trained ? (ends.find(({ until }) => place < until)?.index ?? -1) : -1,
      figures: trained
        ? Object.fromEntries(
            figures.flatMap(([name, values]) => (values[place] === undefined ? [] : [[name, values[place]]])),
          )
        : {},
    };
  });
}

export const COLOURINGS = {
  logprob: { label: "Log-probability", kind: "sequential" },
  entropy: { label: "Entropy", kind: "sequential" },
  advantage: { label: "Advantage", kind: "diverging" },
  ratio: { label: "Ratio", kind: "diverging" },
  difference: { label: "Engine against trainer", kind: "diverging" },
  kl: { label: "KL to the reference", kind: "sequential" },
  clip: { label: "Clip decision", kind: "classes" },
  mask: { label: "Mask", kind: "classes" },
} as const;

export type Colouring = keyof typeof COLOURINGS;

/** The value by which a token is coloured; null where it has none. A ratio counts by its logarithm. */
export function valueOf(token: TokenAt, by: Colouring): number | null {
  const { figures } = token;
  switch (by) {
    case "logprob":
      return figures.engine_logprobs ?? null;
    case "entropy":
      return figures.entropy ?? null;
    case "advantage":
      return figures.advantage ?? null;
    case "ratio":
      return figures.ratio === undefined ? null : Math.log(figures.ratio);
    case "difference":
      return figures.engine_logprobs === undefined || figures.trainer_logprobs === undefined
        ? null
        : figures.trainer_logprobs - figures.engine_logprobs;
    case "kl":
      return figures.kl ?? null;
    case "clip":
      return figures.clipped ?? null;
    case "mask":
      return token.trained ? 1 : 0;
  }
}

/** The smallest and the greatest value; for a diverging scale as far below zero as above. */
export function rangeOf(tokens: readonly TokenAt[], by: Colouring): [number, number] {
  let low = Infinity;
  let high = -Infinity;
  for (const token of tokens) {
    const value = valueOf(token, by);
    if (value === null || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 0];
  if (COLOURINGS[by].kind !== "diverging") return [low, high];
  const far = Math.max(Math.abs(low), Math.abs(high));
  return [-far, far];
}

/** Colours of backgrounds behind dark text: blue for high, orange for low; of one lightness in both directions. */
export function colourOf(value: number | null, [low, high]: [number, number], by: Colouring): string | null {
  if (value === null || !Number.isFinite(value)) return null;
  const { kind } = COLOURINGS[by];
  if (kind === "classes")
    return by === "mask" ? (value ? "rgb(158 202 225)" : null) : value ? "rgb(253 190 133)" : "rgb(222 235 247)";
  if (kind === "diverging") {
    const share = high === 0 ? 0 : value / high;
    const strength = Math.min(1, Math.abs(share));
    return share >= 0
      ? mix([247, 247, 247], [107, 174, 214], strength)
      : mix([247, 247, 247], [244, 165, 96], strength);
  }
  const share = high === low ? (by === "logprob" ? 1 : 0) : (value - low) / (high - low);
  return by === "entropy" || by === "kl"
    ? mix([255, 247, 236], [244, 165, 96], share)
    : mix([244, 165, 96], [255, 247, 236], share);
}

function mix(from: readonly number[], to: readonly number[], share: number): string {
  return `rgb(${from.map((part, at) => Math.round(part + ((to[at] ?? part) - part) * share)).join(" ")})`;
}

/** So many characters of one token are shown. */
const MOST_SHOWN = 60;

/** A token as text that can be seen: white space by signs, half a character by its bytes. */
export function shownToken(text: string | null | undefined, id: number): string {
  if (text === null || text === undefined) return `#${id}`;
  if (text === "") return "∅";
  return visible(text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}…` : text)
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replaceAll(" ", "·");
}
