/* eslint react-hooks/refs: off -- the rows of earlier pages are a cache: a render that is thrown away adds nothing wrong */
/** The rows that are in view, read by pages at their places; those read before stay until the new ones are there. */

import { keepPreviousData, useQueries } from "@tanstack/react-query";
import { useRef } from "react";

import { PAGE, summariesQuery, type SummaryOrder } from "../../api/questions.ts";
import type { RolloutFilter, RolloutSummary } from "../../api/types.ts";

/** `held` leaves out what started at that moment or later, so that nothing moves under who reads; null is all. */
export function useRows(chosen: RolloutFilter, order: SummaryOrder, first: number, last: number, held: number | null) {
  const filter = held === null ? chosen : { ...chosen, started_before: held };
  const list = JSON.stringify([chosen, order]);
  const before = useRef<{ list: string; rows: Map<number, RolloutSummary> }>({ list: "", rows: new Map() });
  const from = Math.floor(Math.max(0, first) / PAGE);
  const to = Math.max(from, Math.floor(Math.max(0, last) / PAGE));
  const pages = Array.from({ length: to - from + 1 }, (_, place) => from + place);
  const answers = useQueries({
    queries: pages.map((page) => ({
      ...summariesQuery(filter, order, page * PAGE),
      placeholderData: keepPreviousData,
    })),
  });
  const rows = new Map<number, RolloutSummary>(before.current.list === list ? before.current.rows : []);
  answers.forEach((answer, place) => {
    if (answer.isPlaceholderData) return;
    answer.data?.items.forEach((row, at) => rows.set((pages[place] ?? 0) * PAGE + at, row));
  });
  for (const place of rows.keys()) if (Math.abs(place - first) > 5 * PAGE) rows.delete(place);
  before.current = { list, rows };
  const known = answers.find((answer) => answer.data !== undefined);
  return {
    rows,
    total: known?.data?.total,
    first: answers[0],
    fetching: answers.some((answer) => answer.isFetching),
  };
}
