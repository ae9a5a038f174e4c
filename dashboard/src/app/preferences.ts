/** What a person has chosen for this browser: density and time zone. The token is not among them. */

import { useSyncExternalStore } from "react";

export interface Preferences {
  density: "compact" | "comfortable";
  zone: string;
}

const KEY = "agl-preferences";
const DEFAULT: Preferences = { density: "comfortable", zone: "local" };
const listeners = new Set<() => void>();
let current = read();

function read(): Preferences {
  try {
    return { ...DEFAULT, ...(JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<Preferences>) };
  } catch {
    return DEFAULT;
  }
}

export function choose(change: Partial<Preferences>): void {
  current = { ...current, ...change };
  try {
    localStorage.setItem(KEY, JSON.stringify(current));
  } catch {
    // a browser without storage keeps the choice until the page is left
  }
  for (const listener of listeners) listener();
}

export function usePreferences(): Preferences {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => current,
  );
}
