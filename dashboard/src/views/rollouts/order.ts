/** The order of a list of rollouts, as the address has it. */

import type { SummaryOrder } from "../../api/questions.ts";
import type { SearchValues } from "../../pure/address.ts";

export function orderOf(search: SearchValues): SummaryOrder {
  return { sort_by: search.sort ?? "start_time", sort_order: search.order === "asc" ? "asc" : "desc" };
}
