/** Writes the rows that pass the filter into a file, page by page by cursor, until done or cancelled. */

import { summaries, type SummaryOrder } from "../../api/questions.ts";
import type { RolloutFilter } from "../../api/types.ts";
import { csvLine } from "../../pure/table.ts";
import type { Column } from "./columns.tsx";

export type Form = "csv" | "jsonl";

export async function exportRows(
  form: Form,
  columns: readonly Column[],
  filter: RolloutFilter,
  order: SummaryOrder,
  tell: (done: number, total: number) => void,
  signal: AbortSignal,
): Promise<Blob> {
  const parts: string[] = form === "csv" ? [csvLine(columns.map((column) => column.label))] : [];
  let cursor: string | null = null;
  let done = 0;
  do {
    const page = await summaries(filter, order, { limit: 1000, ...(cursor ? { cursor } : {}) }, signal);
    for (const row of page.items) {
      parts.push(form === "csv" ? csvLine(columns.map((column) => column.value(row))) : `${JSON.stringify(row)}\n`);
    }
    done += page.items.length;
    cursor = page.cursor;
    tell(done, page.total);
  } while (cursor);
  return new Blob(parts, { type: form === "csv" ? "text/csv;charset=utf-8" : "application/jsonl" });
}

export function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
