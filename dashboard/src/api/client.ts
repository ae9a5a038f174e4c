/** Requests to the store server that this page came from. */

import { getToken } from "./token.ts";

export type FailureKind = "denied" | "gone" | "missing" | "busy" | "invalid" | "unreachable" | "failed";

/** Why a request gave nothing, in the server's own words where it had any. */
export class ApiError extends Error {
  readonly status: number;
  readonly kind: FailureKind;
  readonly retryAfterSeconds: number | null;

  constructor(status: number, message: string, retryAfterSeconds: number | null = null) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.kind = kindOf(status);
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

function kindOf(status: number): FailureKind {
  if (status === 0) return "unreachable";
  if (status === 401 || status === 403) return "denied";
  if (status === 404) return "missing";
  if (status === 410) return "gone";
  if (status === 429 || status === 503) return "busy";
  return status >= 400 && status < 500 ? "invalid" : "failed";
}

export type QueryValue = string | number | boolean | null | undefined | readonly (string | number)[];

/** The address of an operation under `/v1/agl`; relative to the page, so that a proxy's prefix is kept. */
export function addressOf(path: string, query: Readonly<Record<string, QueryValue>> = {}): string {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === null || value === undefined) continue;
    if (Array.isArray(value)) for (const each of value) search.append(name, String(each));
    else search.append(name, String(value));
  }
  const text = search.toString();
  return `v1/agl${path}${text ? `?${text}` : ""}`;
}

export interface CallOptions {
  method?: "GET" | "POST" | "PUT";
  query?: Readonly<Record<string, QueryValue>>;
  body?: unknown;
  signal?: AbortSignal;
}

export function headers(extra: Readonly<Record<string, string>> = {}): Record<string, string> {
  const token = getToken();
  return { ...extra, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
}

/**
 * Make one request and return the answer's JSON.
 *
 * @throws {ApiError} the server refused or failed, or did not answer (status 0).
 */
export async function call<T>(path: string, options: CallOptions = {}): Promise<T> {
  const { method = options.body === undefined ? "GET" : "POST", query, body, signal } = options;
  let reply: Response;
  try {
    reply = await fetch(addressOf(path, query), {
      method,
      headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "No response from the server. Check that it is running.");
  }
  if (!reply.ok) throw new ApiError(reply.status, await reasonOf(reply), secondsOf(reply));
  return (await reply.json()) as T;
}

async function reasonOf(reply: Response): Promise<string> {
  try {
    const body = (await reply.json()) as { detail?: unknown; message?: unknown; error?: unknown };
    const text = body.detail ?? body.message ?? body.error;
    return typeof text === "string" ? text : JSON.stringify(text ?? body);
  } catch {
    return `${reply.status} ${reply.statusText}`;
  }
}

function secondsOf(reply: Response): number | null {
  const seconds = Number(reply.headers.get("Retry-After"));
  return Number.isFinite(seconds) && seconds > 0 ? seconds : null;
}

/** One part of a path: an id may hold any character. */
export function part(id: string): string {
  return encodeURIComponent(id);
}
