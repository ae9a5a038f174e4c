import assert from "node:assert/strict";
import { test } from "vitest";

import { carried, placeOf } from "./place.ts";

test("a link carries filters and order of its list, and nothing else of the address", () => {
  const link = carried({ status: "failed,cancelled", sort: "reward", order: "asc", tab: "tokens", text: "a&b=c" }, 7);
  assert.deepEqual(placeOf({ list: link.list, at: String(link.at) }), {
    search: { status: "failed,cancelled", sort: "reward", order: "asc", text: "a&b=c" },
    at: 7,
  });
});

test("an address without a place has no list", () => {
  assert.equal(placeOf({}), null);
  assert.equal(placeOf({ list: "status=failed" }), null);
  assert.equal(placeOf({ at: "-1" }), null);
  assert.equal(placeOf({ at: "x" }), null);
  assert.deepEqual(placeOf({ at: "0" }), { search: {}, at: 0 });
});
