import { useEffect, useState } from "react";

/** Seconds since the epoch, anew each so many milliseconds; 0 is once. */
export function useNow(every: number): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    if (!every) return;
    const timer = setInterval(() => setNow(Date.now() / 1000), every);
    return () => clearInterval(timer);
  }, [every]);
  return now;
}
