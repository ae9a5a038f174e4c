/** What a row's tokens have of a figure, taken together, and the parts of a row: what was given, and what each call answered. */

import type { TokenAt } from "./tokenRows.ts";

export interface Statistics {
  count: number;
  mean: number;
  low: number;
  high: number;
  median: number;
}

/** Of the values that are numbers; null if there is none. */
export function statisticsOf(values: readonly (number | null)[]): Statistics | null {
  const known = values
    .filter((value): value is number => value !== null && Number.isFinite(value))
    .sort((a, b) => a - b);
  const low = known[0];
  const high = known.at(-1);
  if (low === undefined || high === undefined) return null;
  const half = (known.length - 1) / 2;
  const median = ((known[Math.floor(half)] ?? low) + (known[Math.ceil(half)] ?? low)) / 2;
  return { count: known.length, mean: known.reduce((sum, value) => sum + value, 0) / known.length, low, high, median };
}

/** How many values lie in each of so many parts of equal width; the greatest value is in the last. */
export function histogramOf(
  values: readonly (number | null)[],
  [low, high]: readonly [number, number],
  parts: number,
): number[] {
  const counts = new Array<number>(parts).fill(0);
  for (const value of values) {
    if (value === null || !Number.isFinite(value) || value < low || value > high) continue;
    const at = high === low ? 0 : Math.min(parts - 1, Math.floor(((value - low) / (high - low)) * parts));
    counts[at] = (counts[at] ?? 0) + 1;
  }
  return counts;
}

export interface RowPart {
  from: number;
  to: number;
  /** Index of the call whose answer it is; -1 for what the model was given. */
  call: number;
  trained: boolean;
}

/** The parts of a row in order; a row ends with an answer, and each part before it is a prompt or an earlier answer. */
export function partsOf(tokens: readonly TokenAt[]): RowPart[] {
  const parts: RowPart[] = [];
  for (const { at, call, trained } of tokens) {
    const last = parts.at(-1);
    if (last && last.trained === trained && last.call === call) last.to = at + 1;
    else parts.push({ from: at, to: at + 1, call, trained });
  }
  return parts;
}
