/** What the views ask the store, one function per question; the key's first word is its subject (`app/live.ts`). */

import { keepPreviousData, queryOptions } from "@tanstack/react-query";

import { setServerTime } from "../pure/clock.ts";
import { ApiError, call, part } from "./client.ts";
import type {
  Attempt,
  AttemptConversation,
  AttemptedRollout,
  Comparison,
  Page,
  ResourcesUpdate,
  Rollout,
  RolloutAggregate,
  RolloutExplanation,
  RolloutFilter,
  RolloutSummary,
  Run,
  RunRecord,
  ServerFacts,
  Span,
  TokenText,
  SpanTree,
  Worker,
} from "./types.ts";

export const PAGE = 200;
const MOST_RECORDS = 1000;

export const runsQuery = () =>
  queryOptions({
    queryKey: ["runs", "list"],
    queryFn: ({ signal }) =>
      call<Page<Run>>("/runs", { query: { sort_by: "start_time", sort_order: "desc", limit: 500 }, signal }),
  });

export const runQuery = (runId: string) =>
  queryOptions({
    queryKey: ["runs", "one", runId],
    queryFn: ({ signal }) => call<Run | null>(`/runs/${part(runId)}`, { signal }),
  });

/** All records of some kinds but the ledger's, which are many; page by page. */
export async function allRecords(
  runId: string,
  kinds: readonly string[],
  from: number,
  signal?: AbortSignal,
): Promise<RunRecord[]> {
  const records: RunRecord[] = [];
  for (let cursor: string | null | undefined; cursor !== null;) {
    const page = await call<Page<RunRecord>>(`/runs/${part(runId)}/records`, {
      query: { kind_in: kinds, step_from: from, limit: MOST_RECORDS, cursor },
      signal,
    });
    records.push(...page.items);
    cursor = page.cursor ?? null;
  }
  return records;
}

/** The steps of a run. Those that are known are kept: a live run asks for the new ones only. */
export const stepsQuery = (runId: string) =>
  queryOptions({
    queryKey: ["records", runId, "step"],
    queryFn: async ({ signal, client, queryKey }) => {
      const known = client.getQueryData<RunRecord[]>(queryKey) ?? [];
      const last = known.at(-1);
      const fresh = await allRecords(runId, ["step"], last?.step ?? 0, signal);
      if (last === undefined) return fresh;
      const same = fresh[0]?.step === last.step && fresh[0].time === last.time;
      if (!same) return allRecords(runId, ["step"], 0, signal); // the run was taken back, or the store is another one
      return [...known.slice(0, -1), ...fresh];
    },
  });

export const recordsQuery = (runId: string, kinds: readonly string[]) =>
  queryOptions({
    queryKey: ["records", runId, ...kinds],
    queryFn: ({ signal }) => allRecords(runId, kinds, 0, signal),
  });

export const ledgerQuery = (runId: string | null, rolloutId: string) =>
  queryOptions({
    queryKey: ["records", runId, "ledger", rolloutId],
    enabled: runId !== null,
    queryFn: async ({ signal }) => {
      const page = await call<Page<RunRecord>>(`/runs/${part(runId ?? "")}/records`, {
        query: { kind_in: ["ledger"], name: rolloutId, sort_order: "desc", limit: 1 },
        signal,
      });
      return page.items[0] ?? null;
    },
  });

export const stepLedgerQuery = (runId: string, step: number) =>
  queryOptions({
    queryKey: ["records", runId, "ledger of step", step],
    queryFn: async ({ signal }) => {
      const found: RunRecord[] = [];
      for (;;) {
        const page = await call<Page<RunRecord>>(`/runs/${part(runId)}/records`, {
          query: { kind_in: ["ledger"], step_from: step, step_to: step, limit: PAGE, offset: found.length },
          signal,
        });
        found.push(...page.items);
        if (!page.items.length || found.length >= page.total) return found;
      }
    },
  });

export interface SummaryOrder {
  sort_by: string;
  sort_order: "asc" | "desc";
}

export type Summaries = Page<RolloutSummary> & { cursor: string | null };

export function summaries(
  filter: RolloutFilter,
  order: SummaryOrder,
  window: { limit: number; offset?: number; cursor?: string | null },
  signal?: AbortSignal,
): Promise<Summaries> {
  return call<Summaries>("/rollouts/summaries", { body: { filter, ...order, ...window }, signal });
}

export const summariesQuery = (filter: RolloutFilter, order: SummaryOrder, offset: number, limit = PAGE) =>
  queryOptions({
    queryKey: ["rollouts", "page", filter, order, offset, limit],
    queryFn: ({ signal }) => summaries(filter, order, { limit, offset }, signal),
    placeholderData: keepPreviousData,
  });

export const aggregateQuery = (by: string, filter: RolloutFilter, buckets = 0) =>
  queryOptions({
    queryKey: ["rollouts", "aggregate", by, filter, buckets],
    queryFn: ({ signal }) => call<RolloutAggregate>("/rollouts/aggregate", { body: { by, filter, buckets }, signal }),
    placeholderData: keepPreviousData,
  });

/** One rollout, from the list: its own address answers with the secrets that its agent needs. */
export const rolloutQuery = (rolloutId: string) =>
  queryOptions({
    queryKey: ["rollouts", "one", rolloutId],
    queryFn: async ({ signal }) => {
      const body = { rollout_id_in: [rolloutId], limit: 1 };
      const page = await call<Page<AttemptedRollout | Rollout>>("/rollouts/search", { body, signal });
      return page.items[0] ?? null;
    },
  });

export const attemptsQuery = (rolloutId: string) =>
  queryOptions({
    queryKey: ["rollouts", "attempts", rolloutId],
    queryFn: ({ signal }) => call<Page<Attempt>>(`/rollouts/${part(rolloutId)}/attempts`, { signal }),
  });

export const explanationQuery = (rolloutId: string) =>
  queryOptions({
    queryKey: ["rollouts", "explanation", rolloutId],
    queryFn: ({ signal }) => call<RolloutExplanation>(`/rollouts/${part(rolloutId)}/explanation`, { signal }),
  });

/** The conversation of an attempt; with a limit its first calls, which come soon where there are very many. */
export const conversationQuery = (rolloutId: string, attemptId: string, limit?: number) =>
  queryOptions({
    queryKey: ["rollouts", "conversation", rolloutId, attemptId, limit],
    queryFn: ({ signal }) =>
      call<AttemptConversation>(`/rollouts/${part(rolloutId)}/attempts/${part(attemptId)}/conversation`, {
        query: { limit },
        signal,
      }),
  });

export const treeQuery = (rolloutId: string, attemptId: string) =>
  queryOptions({
    queryKey: ["rollouts", "tree", rolloutId, attemptId],
    queryFn: ({ signal }) =>
      call<SpanTree>(`/rollouts/${part(rolloutId)}/attempts/${part(attemptId)}/tree`, { signal }),
  });

export const spanQuery = (rolloutId: string, attemptId: string, spanId: string) =>
  queryOptions({
    queryKey: ["rollouts", "span", rolloutId, attemptId, spanId],
    queryFn: async ({ signal }) => {
      const page = await call<Page<Span>>("/spans", {
        query: { rollout_id: rolloutId, attempt_id: attemptId, span_id: spanId, limit: 1 },
        signal,
      });
      const span = page.items[0];
      if (!span) throw new ApiError(404, `The store has no span ${spanId} of this attempt`);
      return span;
    },
  });

export const resourcesQuery = () =>
  queryOptions({
    queryKey: ["resources", "list"],
    queryFn: ({ signal }) => call<Page<ResourcesUpdate>>("/resources", { query: { limit: 1000 }, signal }),
  });

/** One version of a set, the newest by default, from the list of versions: its own address answers with secrets. */
export const resourceQuery = (resourcesId: string, version?: number) =>
  queryOptions({
    queryKey: ["resources", "one", resourcesId, version],
    queryFn: async ({ signal }) => {
      const order = version === undefined ? {} : { sort_order: "asc", offset: version - 1 };
      const page = await call<Page<ResourcesUpdate>>(`/resources/${part(resourcesId)}/versions`, {
        query: { ...order, limit: 1 },
        signal,
      });
      return page.items[0] ?? null;
    },
  });

export const workersQuery = () =>
  queryOptions({
    queryKey: ["workers", "list"],
    queryFn: ({ signal }) => call<Page<Worker>>("/workers", { query: { limit: 1000 }, signal }),
    refetchInterval: 5000,
  });

export const serverQuery = () =>
  queryOptions({
    queryKey: ["server"],
    queryFn: async ({ signal }) => {
      const asked = Date.now() / 1000;
      const facts = await call<ServerFacts>("/server", { signal });
      setServerTime(facts.now, asked, Date.now() / 1000);
      return facts;
    },
    refetchInterval: 60_000,
  });

export const comparisonQuery = (before: string, after: string, offset = 0) =>
  queryOptions({
    queryKey: ["records", "comparison", before, after, offset],
    enabled: Boolean(before && after),
    queryFn: ({ signal }) => call<Comparison>("/comparison", { query: { before, after, limit: 200, offset }, signal }),
  });

/** So many token ids are asked for at once. */
const MOST_TOKENS = 10_000;

/** The texts of some tokens by their ids; a vocabulary may have hundreds of thousands, of which a row has few. */
export const tokenTextsQuery = (vocabulary: string | null, ids: readonly number[]) => {
  const wanted = [...new Set(ids)].sort((one, other) => one - other);
  return queryOptions({
    queryKey: ["vocabulary", vocabulary, wanted.join(" ")],
    enabled: vocabulary !== null && wanted.length > 0,
    staleTime: Infinity,
    queryFn: async ({ signal }) => {
      const found = new Map<number, TokenText>();
      for (let from = 0; from < wanted.length; from += MOST_TOKENS) {
        const token_ids = wanted.slice(from, from + MOST_TOKENS);
        const texts = await call<TokenText[] | null>(`/vocabularies/${part(vocabulary ?? "")}/texts`, {
          method: "POST",
          body: { token_ids },
          signal,
        });
        for (const each of texts ?? []) found.set(each.id, each);
      }
      return found;
    },
  });
};
