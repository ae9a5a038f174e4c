/** Figures of training steps as series of a chart. */

import type { AggregateGroup, RunRecord, StepData } from "../api/types.ts";
import { decimal } from "./format.ts";

export type Values = (number | null)[];

/** A number below dotted names, such as `update.loss`; null if there is none. */
export function figure(data: unknown, name: string): number | null {
  let value: unknown = data;
  for (const part of name.split(".")) {
    value = value && typeof value === "object" ? (value as Record<string, unknown>)[part] : undefined;
  }
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

export function figures(records: readonly RunRecord[], name: string): Values {
  return records.map((record) => figure(record.data, name));
}

/** Calls of a step: trained, and left out by reason; `missing` are those that the step says nothing of. */
export interface LedgerBar {
  trained: number;
  excluded: Record<string, number>;
  captured: number;
  missing: number;
}

export function ledgerOf(data: StepData): LedgerBar {
  const excluded = data.calls_excluded ?? {};
  const trained = data.calls_trained ?? 0;
  const captured = data.calls_captured ?? 0;
  const sum = Object.values(excluded).reduce((all, count) => all + count, trained);
  return { trained, excluded, captured, missing: captured - sum };
}

/** Reasons over all steps, the most frequent first. */
export function reasonsOf(bars: readonly LedgerBar[]): string[] {
  const counts = new Map<string, number>();
  for (const bar of bars)
    for (const [reason, count] of Object.entries(bar.excluded)) counts.set(reason, (counts.get(reason) ?? 0) + count);
  return [...counts].sort((a, b) => b[1] - a[1]).map(([reason]) => reason);
}

/** Names of the phases whose time the steps tell. */
export function phasesOf(records: readonly RunRecord[]): string[] {
  const names = new Set<string>();
  for (const record of records)
    for (const name of Object.keys((record.data as StepData).seconds ?? {})) names.add(name);
  return [...names];
}

export type Interval = [mean: number | null, low: number | null, high: number | null];

type Rewards = Pick<AggregateGroup, "mean" | "stderr" | "scored" | "minimum" | "maximum">;

/** Mean reward with its 95 % interval, by the rules of `interval_of` in agentlightning/evaluation/statistics.py: Wilson's
 * for rewards of 0 and 1 and for equal ones between them, otherwise Student's t, cut at 0 and 1 if all rewards are
 * between them. A single reward and equal ones of unknown range have none. */
export function interval(group: Rewards | undefined): Interval {
  const mean = group?.mean;
  if (!group || mean === null || mean === undefined) return [null, null, null];
  const { scored: n, minimum: least, maximum: most } = group;
  const stderr = group.stderr ?? 0;
  const within = least !== null && most !== null && least >= 0 && most <= 1;
  const binary = Math.abs(stderr * stderr * (n - 1) - mean * (1 - mean)) < 1e-9; // rewards in 0 to 1 vary most so
  if (within && (binary || (least === most && n > 1))) return [mean, ...wilson(mean, n)];
  if (n < 2 || least === most) return [mean, null, null];
  const half = tQuantile(n - 1) * stderr;
  return within ? [mean, Math.max(0, mean - half), Math.min(1, mean + half)] : [mean, mean - half, mean + half];
}

export function meanInterval(rewards: readonly (number | null)[]): Interval | null {
  const known = rewards.filter((reward): reward is number => reward !== null && Number.isFinite(reward));
  const n = known.length;
  if (!n) return null;
  const mean = known.reduce((sum, reward) => sum + reward, 0) / n;
  const squares = known.reduce((sum, reward) => sum + (reward - mean) ** 2, 0);
  const stderr = n > 1 ? Math.sqrt(squares / (n - 1) / n) : null;
  return interval({ mean, stderr, scored: n, minimum: Math.min(...known), maximum: Math.max(...known) });
}

/** The limits of an interval as text; empty without any. */
export function limits([, low, high]: readonly (number | null)[]): string {
  return typeof low === "number" && typeof high === "number" ? `95 % interval ${decimal(low)} to ${decimal(high)}` : "";
}

const Z = 1.959964;

function wilson(mean: number, n: number): [number, number] {
  const shrink = 1 + (Z * Z) / n;
  const middle = (mean + (Z * Z) / (2 * n)) / shrink;
  const half = (Z / shrink) * Math.sqrt((mean * (1 - mean)) / n + (Z * Z) / (4 * n * n));
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

/** The 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; exact for one and two degrees of freedom). */
function tQuantile(freedom: number): number {
  if (freedom < 3) return freedom === 1 ? 12.7062 : 4.30265;
  const z = Z;
  const terms = [
    (z ** 3 + z) / 4,
    (5 * z ** 5 + 16 * z ** 3 + 3 * z) / 96,
    (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / 384,
    (79 * z ** 9 + 776 * z ** 7 + 1482 * z ** 5 - 1920 * z ** 3 - 945 * z) / 92_160,
  ];
  return terms.reduce((sum, term, place) => sum + term / freedom ** (place + 1), z);
}

export interface Alarm {
  name: string;
  from: number;
  /** The step after which it was over; null while it lasts, or if it happened once. */
  until: number | null;
  text: string;
  toTry: string;
  lasts: boolean;
}

/** Alarms of a run: a condition that lasts has a record where it begins and one where it is over. */
export function alarmsOf(records: readonly RunRecord[]): Alarm[] {
  const found: Alarm[] = [];
  const open = new Map<string, Alarm>();
  for (const record of records) {
    const data = record.data as { text?: string; state?: string; since?: number; what_to_try?: string };
    const key = `${record.name} ${data.since ?? record.step}`;
    if (data.state === "over") {
      const alarm = open.get(key);
      if (alarm) {
        alarm.until = record.step;
        alarm.lasts = false;
      }
      continue;
    }
    const alarm = {
      name: record.name ?? "",
      from: record.step,
      until: null,
      text: data.text ?? "",
      toTry: data.what_to_try ?? "",
      lasts: data.state === "raised",
    };
    found.push(alarm);
    open.set(key, alarm);
  }
  return found;
}
