import assert from "node:assert/strict";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "vitest";
import { type Connection, follow, type StoreEvent } from "./events.ts";

/** Serve the stream, and let `fetch` find it as the page does. */
async function serve(answer: (request: IncomingMessage, response: ServerResponse) => void): Promise<() => void> {
  const server = createServer(answer);
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const real = globalThis.fetch;
  const base = `http://127.0.0.1:${(server.address() as AddressInfo).port}/`;
  globalThis.fetch = (path, options) => real(new URL(path as string, base), options);
  return () => {
    globalThis.fetch = real;
    server.closeAllConnections();
    server.close();
  };
}

test("a connection on which nothing comes any more is replaced, and goes on behind the last event", async () => {
  const asked: (string | string[] | undefined)[] = [];
  const close = await serve((request, response) => {
    asked.push(request.headers["last-event-id"]);
    response.writeHead(200, { "content-type": "text/event-stream" });
    const number = Number(asked.at(-1) ?? 0) + 1;
    response.write(`id: ${number}\nevent: rollout\ndata: {"number":${number}}\n\n`); // and then nothing, as a dead line
  });
  const events: StoreEvent[] = [];
  const states: Connection[] = [];
  await new Promise<void>((resolve) => {
    const stop = follow(
      {
        onEvents: (some) => {
          events.push(...some);
          if (events.length === 2) resolve(stop());
        },
        onConnection: (state) => states.push(state),
        onOtherStore: () => assert.fail("it is the same store"),
      },
      100,
    );
  });
  close();
  assert.equal(asked[0], undefined);
  assert.equal(asked.at(-1), "1");
  assert.deepEqual(
    events.map((event) => event.data.number),
    [1, 2],
  );
  assert.equal(states[0], "connecting");
  assert.equal(states.at(-1), "live");
  assert(states.includes("lost"));
});
