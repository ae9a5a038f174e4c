/** Writes the rows that pass the filter into a file, page by page by cursor, until done or cancelled. */

import { summaries, type SummaryOrder } from "../../api/questions.ts";
import type { RolloutFilter } from "../../api/types.ts";
import { csvLine } from "../../pure/table.ts";
import type { Column } from "./columns.tsx";

export type Form = "csv" | "jsonl";

/** So many rows are written at most: the browser holds the file in its memory until it is saved. */
export const MOST_ROWS = 200_000;

export interface Exported {
  file: Blob;
  rows: number;
  /** How many pass the filter. */
  total: number;
}

export async function exportRows(
  form: Form,
  columns: readonly Column[],
  filter: RolloutFilter,
  order: SummaryOrder,
  tell: (done: number, total: number) => void,
  signal: AbortSignal,
): Promise<Exported> {
  const parts: string[] = form === "csv" ? [csvLine(columns.map((column) => column.label))] : [];
  let cursor: string | null = null;
  let done = 0;
  let total = 0;
  do {
    const page = await summaries(
      filter,
      order,
      { limit: Math.min(1000, MOST_ROWS - done), ...(cursor ? { cursor } : {}) },
      signal,
    );
    for (const row of page.items) {
      parts.push(form === "csv" ? csvLine(columns.map((column) => column.value(row))) : `${JSON.stringify(row)}\n`);
    }
    done += page.items.length;
    cursor = page.cursor;
    total = page.total;
    tell(done, Math.min(total, MOST_ROWS));
  } while (cursor && done < MOST_ROWS);
  return {
    file: new Blob(parts, { type: form === "csv" ? "text/csv;charset=utf-8" : "application/jsonl" }),
    rows: done,
    total,
  };
}

export function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
