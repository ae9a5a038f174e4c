/** Figures of training steps as series of a chart. */

import type { AggregateGroup, RunRecord, StepData } from "../api/types.ts";

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

/** Mean with its 95 % interval by the normal approximation, from an aggregate's group. */
export function interval(group: AggregateGroup | undefined): [number | null, number | null, number | null] {
  if (!group || group.mean === null || group.mean === undefined) return [null, null, null];
  const half = 1.96 * (group.stderr ?? 0);
  return [group.mean, group.mean - half, group.mean + half];
}

/** Wilson's interval at 95 % for rewards that are all 0 or 1, else mean and normal approximation (Wilson, 1927). */
export function meanInterval(rewards: readonly (number | null)[]): [number, number, number] | null {
  const known = rewards.filter((reward): reward is number => reward !== null && Number.isFinite(reward));
  const n = known.length;
  if (!n) return null;
  const mean = known.reduce((sum, reward) => sum + reward, 0) / n;
  const z = 1.96;
  if (known.every((reward) => reward === 0 || reward === 1)) {
    const middle = (mean + (z * z) / (2 * n)) / (1 + (z * z) / n);
    const half = (z / (1 + (z * z) / n)) * Math.sqrt((mean * (1 - mean)) / n + (z * z) / (4 * n * n));
    return [mean, middle - half, middle + half];
  }
  const variance = n > 1 ? known.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (n - 1) : 0;
  const half = z * Math.sqrt(variance / n);
  return [mean, mean - half, mean + half];
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
