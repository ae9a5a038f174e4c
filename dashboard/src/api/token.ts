/** The server's token. It is kept in memory only: a reload forgets it, and no other page can read it. */

type Listener = () => void;

let token: string | null = null;
const listeners = new Set<Listener>();

export function getToken(): string | null {
  return token;
}

export function setToken(value: string | null): void {
  token = value?.trim() || null;
  for (const listener of listeners) listener();
}

export function onToken(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
