/** The values of the store's interface, by their names there. */

import type { components } from "./schema.d.ts";

type Schemas = components["schemas"];

export type Run = Schemas["Run"];
export type RunRecord = Schemas["RunRecord"];
export type Rollout = Schemas["Rollout"];
export type AttemptedRollout = Schemas["AttemptedRollout"];
export type Attempt = Schemas["Attempt"];
export type Span = Schemas["Span"];
export type Worker = Schemas["Worker"];
export type ResourcesUpdate = Schemas["ResourcesUpdate"];
export type RolloutSummary = Schemas["RolloutSummary"];
export type RolloutFilter = Partial<Schemas["RolloutFilter"]>;
export type RolloutAggregate = Schemas["RolloutAggregate"];
export type AggregateGroup = Schemas["AggregateGroup"];
export type RolloutExplanation = Schemas["RolloutExplanation"];
export type CallExplanation = Schemas["CallExplanation"];
export type AttemptConversation = Schemas["AttemptConversation"];
export type ConversationCall = Schemas["ConversationCall"];
export type ShownMessage = Schemas["ShownMessage"];
export type SpanTree = Schemas["SpanTree"];
export type SpanNode = Schemas["SpanNode"];
export type Comparison = Schemas["Comparison"];
export type TokenText = Schemas["TokenText"];
export type ServerFacts = Schemas["ServerFacts"];

export interface Page<T> {
  items: T[];
  total: number;
  limit: number;
  offset: number;
  cursor?: string | null;
}

/** What an algorithm writes down of a training step; other algorithms than GRPO have fewer of these. */
export interface StepData {
  step?: number;
  steps?: number;
  mean_reward?: number | null;
  held_out?: number | null;
  rollouts_done?: number;
  rollouts_failed?: number;
  calls_captured?: number;
  calls_trained?: number;
  calls_excluded?: Record<string, number>;
  rollouts_excluded?: Record<string, number>;
  tokens_per_second?: number;
  seconds?: Record<string, number>;
  update?: Record<string, number | null>;
  seams?: Record<string, number>;
  drift_rate?: number;
  [name: string]: unknown;
}

/** An array of the ledger: little-endian numbers in base64. */
export interface PackedNumbers {
  dtype: "i32" | "u8" | "f32";
  data: string;
}

/** What the loss used of one row; arrays but `tokens` and `mask` have one number per trained token. */
export interface LedgerRow {
  row: number;
  vocabulary: string | null;
  length: number;
  /** The policy that learns from it, where a run has several. */
  policy?: string;
  tokens?: PackedNumbers;
  mask?: PackedNumbers;
  [figure: string]: unknown;
}

export interface LedgerCall {
  call_id: string;
  attempt_id: string;
  ending: "trained" | "excluded";
  reason: string | null;
  row: number | null;
  tokens: number;
  advantage: number | null;
  weight_version: number | null;
}

export interface LedgerData {
  rollout_id: string;
  attempt_id: string | null;
  reward: number | null;
  outcome: string | null;
  verdict: string | null;
  group: number | null;
  advantage: number | null;
  weight_versions: number[];
  calls: LedgerCall[];
  rows?: LedgerRow[];
}
