/** The columns of the list: what they show, how wide they are, and by what the store can sort them. */

import type { ReactNode } from "react";

import type { RolloutSummary } from "../../api/types.ts";
import { Moment } from "../../parts/Moment.tsx";
import { StatusBadge } from "../../parts/StatusBadge.tsx";
import { count, decimal, duration, inputWords, isoTime } from "../../pure/format.ts";
import { named } from "../../pure/visible.ts";

export interface Column {
  id: string;
  label: string;
  /** In pixels; the one without a width takes what is left. */
  width?: number;
  right?: boolean;
  sort?: string;
  show: (row: RolloutSummary) => ReactNode;
  value: (row: RolloutSummary) => unknown;
}

function seconds(row: RolloutSummary): number | null {
  return row.end_time === null ? null : row.end_time - row.start_time;
}

export const columns: Column[] = [
  { id: "id", label: "Rollout", width: 150, show: (row) => row.rollout_id, value: (row) => row.rollout_id },
  { id: "status", label: "Status", width: 128, sort: "status", show: (row) => <StatusBadge status={row.status} />, value: (row) => row.status },
  { id: "outcome", label: "Outcome", width: 112, show: (row) => (row.outcome ? <span title={row.outcome_reason ? named(row.outcome_reason) : undefined}>{row.outcome.replaceAll("_", " ")}{row.outcome_reason ? ` · ${named(row.outcome_reason)}` : ""}</span> : "–"), value: (row) => row.outcome },
  { id: "reward", label: "Reward", width: 84, right: true, sort: "reward", show: (row) => decimal(row.reward), value: (row) => row.reward },
  { id: "mode", label: "Mode", width: 64, show: (row) => row.mode ?? "–", value: (row) => row.mode },
  { id: "step", label: "Step", width: 60, right: true, sort: "step", show: (row) => count(row.step), value: (row) => row.step },
  { id: "task", label: "Task", width: 60, right: true, show: (row) => row.task ?? "–", value: (row) => row.task },
  { id: "input", label: "Input", show: (row) => <span title={named(row.input_preview, 1000)}>{named(inputWords(row.input_preview))}</span>, value: (row) => row.input_preview },
  { id: "start", label: "Started", width: 174, sort: "start_time", show: (row) => <Moment at={row.start_time} />, value: (row) => isoTime(row.start_time) },
  { id: "duration", label: "Duration", width: 92, right: true, sort: "duration", show: (row) => duration(seconds(row)), value: seconds },
  { id: "attempts", label: "Attempts", width: 88, right: true, sort: "attempts", show: (row) => count(row.attempts), value: (row) => row.attempts },
  { id: "spans", label: "Spans", width: 72, right: true, sort: "spans", show: (row) => count(row.spans), value: (row) => row.spans },
  { id: "worker", label: "Worker", width: 130, show: (row) => row.worker_id ?? "–", value: (row) => row.worker_id },
  { id: "resources", label: "Resources", width: 170, show: (row) => (row.resources_id ? `${row.resources_id} @${row.resources_version}` : "–"), value: (row) => (row.resources_id ? `${row.resources_id}@${row.resources_version}` : null) },
  { id: "run", label: "Run", width: 150, show: (row) => row.run_id ?? "–", value: (row) => row.run_id },
  { id: "error", label: "Error", width: 150, show: (row) => row.error_type ?? "–", value: (row) => row.error_type },
]; // prettier-ignore

export const USUAL = ["id", "status", "outcome", "reward", "mode", "step", "task", "input", "start", "duration"];

/** The chosen columns in the order of the list; unknown names are passed over. */
export function chosenColumns(text: string | undefined): Column[] {
  const names = new Set(text ? text.split(",") : USUAL);
  const found = columns.filter((column) => names.has(column.id));
  return found.length ? found : columns.filter((column) => USUAL.includes(column.id));
}
