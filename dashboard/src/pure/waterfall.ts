/** A tree of spans as the rows of a waterfall. */

import type { SpanNode } from "../api/types.ts";

export interface SpanRow {
  span: SpanNode;
  depth: number;
  /** How many spans are below it. */
  below: number;
  /** Its place among its siblings, from 1, and how many there are. */
  place: number;
  siblings: number;
  parent: number;
}

export type SpanKind = "call" | "reward" | "tool" | "agent" | "virtual" | "other";

/** The rows in order, without what is below a closed span. Deep trees are no trouble. */
export function rowsOf(roots: readonly SpanNode[], closed: ReadonlySet<string>): SpanRow[] {
  const rows: SpanRow[] = [];
  const counts = new Map<SpanNode, number>();
  const order: SpanNode[] = [];
  const waiting = [...roots];
  while (waiting.length) {
    const node = waiting.pop();
    if (!node) break;
    order.push(node);
    waiting.push(...node.children);
  }
  for (const node of order.reverse()) {
    counts.set(
      node,
      node.children.reduce((sum, child) => sum + 1 + (counts.get(child) ?? 0), 0),
    );
  }
  type Open = { node: SpanNode; depth: number; place: number; siblings: number; parent: number };
  const openOf = (nodes: readonly SpanNode[], depth: number, parent: number): Open[] =>
    nodes.map((node, at) => ({ node, depth, place: at + 1, siblings: nodes.length, parent })).reverse();
  const stack = openOf(byTime(roots), 0, -1);
  for (let next = stack.pop(); next; next = stack.pop()) {
    const { node, depth, place, siblings, parent } = next;
    rows.push({ span: node, depth, below: counts.get(node) ?? 0, place, siblings, parent });
    if (!closed.has(node.span_id)) stack.push(...openOf(byTime(node.children), depth + 1, rows.length - 1));
  }
  return rows;
}

function byTime(nodes: readonly SpanNode[]): SpanNode[] {
  return [...nodes].sort(
    (a, b) => (a.start_time ?? Infinity) - (b.start_time ?? Infinity) || a.sequence_id - b.sequence_id,
  );
}

/** The first and the last moment of all rows; a span that has not ended reaches to `now`. */
export function timesOf(rows: readonly SpanRow[], now: number): [number, number] {
  let low = Infinity;
  let high = -Infinity;
  for (const { span } of rows) {
    if (span.start_time === null) continue;
    low = Math.min(low, span.start_time);
    high = Math.max(high, span.end_time ?? now);
  }
  return low > high ? [0, 1] : [low, Math.max(high, low + 1e-6)];
}

export function kindOf(span: SpanNode): SpanKind {
  if (span.span_id.startsWith("virtual")) return "virtual";
  if (span.reward !== null) return "reward";
  if (/litellm_request|raw_gen_ai_request|chat|completion|generate|\bllm\b/i.test(span.name)) return "call";
  if (/tool/i.test(span.name)) return "tool";
  return span.agent ? "agent" : "other";
}

/** Spans that make the attempt long: from the longest root down, each time the child that ends last. */
export function criticalPath(rows: readonly SpanRow[]): Set<string> {
  const path = new Set<string>();
  let nodes: readonly SpanNode[] = rows.filter((row) => row.depth === 0).map((row) => row.span);
  while (nodes.length) {
    const last = nodes.reduce((best, node) =>
      (node.end_time ?? Infinity) > (best.end_time ?? Infinity) ? node : best,
    );
    if (path.has(last.span_id)) break;
    path.add(last.span_id);
    nodes = last.children;
  }
  return path;
}

/** Stretches in which no model call, no tool and no span without children ran, longer than a fiftieth of the whole. */
export function gapsOf(rows: readonly SpanRow[], low: number, high: number, now: number): [number, number][] {
  const busy = rows
    .filter(({ span, below }) => span.start_time !== null && (below === 0 || ["call", "tool"].includes(kindOf(span))))
    .map(({ span }): [number, number] => [span.start_time ?? low, span.end_time ?? now])
    .sort((a, b) => a[0] - b[0]);
  const gaps: [number, number][] = [];
  let until = low;
  for (const [start, end] of busy) {
    if (start - until > (high - low) / 50) gaps.push([until, start]);
    until = Math.max(until, end);
  }
  if (high - until > (high - low) / 50) gaps.push([until, high]);
  return gaps;
}

/** A part of the time, a factor smaller or larger around its middle, and never beyond the whole. */
export function zoomed([from, to]: [number, number], factor: number, [low, high]: [number, number]): [number, number] {
  const middle = (from + to) / 2;
  const half = Math.min(high - low, Math.max(1e-6, (to - from) * factor)) / 2;
  return moved([middle - half, middle + half], 0, [low, high]);
}

/** The same part, a share of its length further or back, and never beyond the whole. */
export function moved([from, to]: [number, number], share: number, [low, high]: [number, number]): [number, number] {
  const length = to - from;
  const start = Math.min(high - length, Math.max(low, from + share * length));
  return [start, start + length];
}
