/** The server's clock, which every time of the store is by: the browser's may be hours away from it. */

let ahead = 0;

/** Take over what the server said its time was: `asked` and `heard` are the browser's seconds around the request. */
export function setServerTime(now: number, asked: number, heard: number): void {
  ahead = now - (asked + heard) / 2;
}

/** Seconds since the epoch, as the server counts. */
export function serverNow(own: number = Date.now() / 1000): number {
  return own + ahead;
}
