/** One stream of events for the whole page: what changed is asked for again, each subject at most once in 0.8 seconds. */

import { useQueryClient, type QueryClient } from "@tanstack/react-query";
import { useEffect, useState, useSyncExternalStore } from "react";

import { follow, type Connection, type StoreEvent } from "../api/events.ts";
import { getToken, onToken } from "../api/token.ts";

/** Queries begin with one of these words, so that an event finds those it concerns. */
export type Subject = "runs" | "records" | "rollouts" | "resources" | "workers" | "server";

/** So long after the first change of a quiet time the page asks: what is stored together is heard of together. */
const SOON_MS = 100;
/** While changes go on, this is between two times: each costs the server a page of rows. */
const PAUSE_MS = 800;
/** So long the page says that it fell behind. */
const TOLD_MS = 10_000;
const concerned: Record<string, Subject[]> = {
  rollout: ["rollouts"],
  run: ["runs", "records"],
  resources: ["resources"],
  worker: ["workers"],
  lag: ["runs", "records", "rollouts", "resources", "workers"],
};

const listeners = new Set<(events: StoreEvent[]) => void>();

/** Hear every event as it comes; for views that change rows in place. */
export function onStoreEvents(listener: (events: StoreEvent[]) => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Mark as stale what the events concern: every query whose key names that subject, and that id where it has one. */
export function staleKeys(events: readonly StoreEvent[]): Subject[] {
  return [...new Set(events.flatMap(({ event }) => concerned[event] ?? []))];
}

function collector(queries: QueryClient): (events: StoreEvent[]) => void {
  const due = new Map<Subject, number>();
  const waiting = new Set<Subject>();
  return (events) => {
    for (const listener of listeners) listener(events);
    for (const subject of staleKeys(events)) {
      if (waiting.has(subject)) continue;
      waiting.add(subject);
      const pause = Math.max(SOON_MS, (due.get(subject) ?? 0) - performance.now());
      setTimeout(() => {
        waiting.delete(subject);
        due.set(subject, performance.now() + PAUSE_MS);
        void queries.invalidateQueries({ queryKey: [subject] });
      }, pause);
    }
  };
}

export interface LiveStore {
  connection: Connection;
  /** So many changes at least came at once a moment ago, so that lists were read anew; null as a rule. */
  behind: number | null;
}

/** Follow the store while the page is open, and say how the connection stands. */
export function useLiveStore(): LiveStore {
  const queries = useQueryClient();
  const token = useSyncExternalStore(onToken, getToken);
  const [state, setState] = useState<Connection>("connecting");
  const [behind, setBehind] = useState<number | null>(null);
  useEffect(() => {
    let was: Connection = "connecting";
    let forget: ReturnType<typeof setTimeout> | undefined;
    const collect = collector(queries);
    const stop = follow({
      onEvents: (events) => {
        collect(events);
        const lag = events.findLast(({ event }) => event === "lag");
        if (!lag) return;
        clearTimeout(forget);
        setBehind(typeof lag.data.behind === "number" ? lag.data.behind : 0);
        forget = setTimeout(() => setBehind(null), TOLD_MS);
      },
      onOtherStore: () => void queries.resetQueries(),
      onConnection: (now) => {
        if (now === "live" && was === "lost") void queries.invalidateQueries();
        was = now;
        setState(now);
      },
    });
    return () => {
      clearTimeout(forget);
      stop();
    };
  }, [queries, token]);
  return { connection: state, behind };
}
