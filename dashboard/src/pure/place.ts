/** Where a rollout stands in the list that it was opened from: its filters and order, and its place there. */

import { parseSearch, stringifySearch, type SearchValues } from "./address.ts";
import { FILTERS } from "./filters.ts";

export interface Place {
  search: SearchValues;
  at: number;
}

/** What a link from row `at` of a list carries. */
export function carried(list: SearchValues, at: number): { list: string; at: number } {
  const kept = [...FILTERS, "sort", "order", "columns"].map((name) => [name, list[name]] as const);
  return { list: stringifySearch(Object.fromEntries(kept)).slice(1), at };
}

/** The list of such a link; null where an address has none. */
export function placeOf(search: SearchValues): Place | null {
  const at = Number(search.at);
  if (search.at === undefined || !Number.isInteger(at) || at < 0) return null;
  return { search: parseSearch(search.list ?? ""), at };
}
