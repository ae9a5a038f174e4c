/** Filters of rollouts as the address has them, and as the store takes them. */

import type { RolloutFilter } from "../api/types.ts";
import type { SearchValues } from "./address.ts";

export const STATUSES = ["queuing", "preparing", "running", "succeeded", "failed", "requeuing", "cancelled"] as const;
export const MODES = ["train", "val", "test"] as const;
export const OUTCOMES = ["scored", "policy_fault", "infrastructure_fault", "cancelled", "unscored"] as const;

/** Names in the address that are filters; the others of the list are its order and its columns. */
export const FILTERS = [
  "run", "status", "mode", "outcome", "step_from", "step_to", "reward_from", "reward_to", "worker", "resources",
  "version", "text", "id", "task",
] as const; // prettier-ignore

function listOf<T extends string>(text: string | undefined, known: readonly T[]): T[] | undefined {
  const chosen = (text ?? "").split(",").filter((each): each is T => (known as readonly string[]).includes(each));
  return chosen.length ? chosen : undefined;
}

function numberOf(text: string | undefined): number | undefined {
  if (text === undefined || text.trim() === "") return undefined;
  const value = Number(text);
  return Number.isFinite(value) ? value : undefined;
}

function wholeOf(text: string | undefined): number | undefined {
  const value = numberOf(text);
  return value !== undefined && Number.isInteger(value) ? value : undefined;
}

/** What the store is asked for. A value of the address that is none is left out, as if it was not given. */
export function filterOf(search: SearchValues): RolloutFilter {
  const task = search.task === undefined || search.task === "" ? undefined : (wholeOf(search.task) ?? search.task);
  const found = {
    run_id: search.run || undefined,
    status_in: listOf(search.status, STATUSES),
    mode_in: listOf(search.mode, MODES),
    outcome_in: listOf(search.outcome, OUTCOMES),
    step_from: wholeOf(search.step_from),
    step_to: wholeOf(search.step_to),
    reward_from: numberOf(search.reward_from),
    reward_to: numberOf(search.reward_to),
    worker_id: search.worker || undefined,
    resources_id: search.resources || undefined,
    resources_version: wholeOf(search.version),
    input_contains: search.text || undefined,
    rollout_id_contains: search.id || undefined,
    task,
  };
  return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
}
