/**
 * Changes of the store as they happen: server-sent events, read by fetch so that the token travels in a header.
 *
 * The stream goes on from the last event it saw after an interruption (`Last-Event-ID`).
 */

import { ApiError, addressOf, headers } from "./client.ts";

export interface StoreEvent {
  id: string;
  /** `rollout`, `run`, `resources`, `worker`, `cursor`, `lag` or `error`. */
  event: string;
  data: Record<string, unknown>;
}

export type Connection = "connecting" | "live" | "lost" | "denied";

export interface Follower {
  onEvents: (events: StoreEvent[]) => void;
  onConnection: (state: Connection) => void;
  /** Another store answers at this address now: what was read of the one before is worth nothing. */
  onOtherStore: () => void;
}

const LONGEST_PAUSE_MS = 10_000;
/** The server writes at least this often. */
const KEEP_ALIVE_MS = 15_000;
/** After so many such spans without a byte the connection is dead. They are counted, since a page that stood still has heard nothing. */
const MOST_QUIET = 4;

/** Split what has come so far into whole events and the rest. */
export function parseEvents(text: string): { events: StoreEvent[]; rest: string } {
  const blocks = text.split(/\r?\n\r?\n/);
  const rest = blocks.pop() ?? "";
  const events: StoreEvent[] = [];
  for (const block of blocks) {
    const found: StoreEvent = { id: "", event: "message", data: {} };
    const data: string[] = [];
    for (const line of block.split(/\r?\n/)) {
      const colon = line.indexOf(":");
      if (colon <= 0) continue;
      const name = line.slice(0, colon);
      const value = line.slice(colon + 1).replace(/^ /, "");
      if (name === "id") found.id = value;
      else if (name === "event") found.event = value;
      else if (name === "data") data.push(value);
    }
    if (!data.length) continue;
    try {
      found.data = JSON.parse(data.join("\n")) as Record<string, unknown>;
    } catch {
      continue;
    }
    events.push(found);
  }
  return { events, rest };
}

/** Follow the store until the returned function is called. */
export function follow(follower: Follower, keepAliveMs = KEEP_ALIVE_MS): () => void {
  const stop = new AbortController();
  let cursor = "";
  let pause = 250;

  async function once(): Promise<void> {
    const dead = new AbortController();
    let quiet = 0;
    const ticks = setInterval(() => {
      quiet += 1;
      if (quiet >= MOST_QUIET) dead.abort();
    }, keepAliveMs);
    try {
      await read(AbortSignal.any([stop.signal, dead.signal]), () => (quiet = 0));
    } finally {
      clearInterval(ticks);
    }
  }

  async function read(signal: AbortSignal, heard: () => void): Promise<void> {
    const reply = await fetch(addressOf("/events"), {
      headers: headers(cursor ? { "Last-Event-ID": cursor } : {}),
      signal,
      cache: "no-store",
    });
    heard();
    if (!reply.ok || !reply.body) {
      if (reply.status === 400 && cursor) {
        cursor = "";
        follower.onOtherStore();
      }
      throw new ApiError(reply.status, reply.statusText);
    }
    follower.onConnection("live");
    pause = 250;
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const parsed = parseEvents(rest + value);
      rest = parsed.rest;
      const last = parsed.events.at(-1);
      if (last?.id) cursor = last.id;
      if (parsed.events.length) follower.onEvents(parsed.events);
    }
  }

  async function run(): Promise<void> {
    while (!stop.signal.aborted) {
      let state: Connection = "lost";
      try {
        await once();
      } catch (error) {
        if (stop.signal.aborted) return;
        if (error instanceof ApiError && error.kind === "denied") state = "denied";
      }
      if (stop.signal.aborted) return;
      follower.onConnection(state);
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }

  follower.onConnection("connecting");
  void run();
  return () => stop.abort();
}
