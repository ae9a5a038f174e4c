import assert from "node:assert/strict";
import { test } from "vitest";

import { firstDifference } from "./parting.ts";

test("lists part where the first of them differs", () => {
  assert.deepEqual(
    firstDifference([
      [1, 2, 3],
      [1, 2],
      [1, 2, 3],
    ]),
    { at: 2 },
  );
  assert.deepEqual(firstDifference([[1], [1], []]), { at: -1 });
  assert.equal(firstDifference([[1], []]), null);
});
