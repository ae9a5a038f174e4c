import { useEffect, useState } from "react";

import { serverNow } from "../pure/clock.ts";

/** Seconds since the epoch by the server's clock, anew each so many milliseconds; 0 is once. */
export function useNow(every: number): number {
  const [now, setNow] = useState(serverNow);
  useEffect(() => {
    if (!every) return;
    const timer = setInterval(() => setNow(serverNow()), every);
    return () => clearInterval(timer);
  }, [every]);
  return now;
}
