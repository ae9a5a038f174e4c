import { useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback } from "react";

import type { SearchValues } from "../pure/address.ts";

/** The search part of the address, and a function that changes some of it; a change replaces the entry in history. */
export function useAddress(): [SearchValues, (change: SearchValues, options?: { push?: boolean }) => void] {
  const search = useSearch({ strict: false }) as SearchValues;
  const navigate = useNavigate();
  const change = useCallback(
    (values: SearchValues, options: { push?: boolean } = {}) =>
      void navigate({
        to: ".",
        search: (before: SearchValues) => ({ ...before, ...values }),
        replace: !options.push,
        resetScroll: false,
      } as Parameters<typeof navigate>[0]),
    [navigate],
  );
  return [search, change];
}
