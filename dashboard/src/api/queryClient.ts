import { QueryClient } from "@tanstack/react-query";

import { ApiError } from "./client.ts";

const TRIES = 3;

/** Answers stay fresh until an event says that they changed; a refusal is not asked for again. */
export const queryClient = new QueryClient({
  defaultOptions: {
    queries: {
      staleTime: 30_000,
      gcTime: 60_000,
      refetchOnWindowFocus: false,
      retry: (count, error) =>
        count < TRIES && (!(error instanceof ApiError) || ["unreachable", "busy", "failed"].includes(error.kind)),
      retryDelay: (count, error) =>
        error instanceof ApiError && error.retryAfterSeconds !== null
          ? error.retryAfterSeconds * 1000
          : Math.min(500 * 2 ** count, 8000),
    },
  },
});
