/** The views, each loaded when it is first shown, or ahead of that while the server answers. */

import { ApiError } from "../api/client.ts";

/**
 * Say what is wrong where a file cannot be had. By the browser's own error the router would load the page anew, which
 * without a server leaves it.
 */
function loading<T>(load: () => Promise<T>): () => Promise<T> {
  return () =>
    load().catch(() => {
      throw new ApiError(
        0,
        "Cannot load the view: the server does not respond or has another version. Reload the page when the server is available.",
      );
    });
}

export const views = {
  Runs: loading(() => import("../views/runs/Runs.tsx")),
  RunOverview: loading(() => import("../views/run/RunOverview.tsx")),
  Group: loading(() => import("../views/group/Group.tsx")),
  Rollouts: loading(() => import("../views/rollouts/Rollouts.tsx")),
  RolloutPage: loading(() => import("../views/rollout/RolloutPage.tsx")),
  Waterfall: loading(() => import("../views/waterfall/Waterfall.tsx")),
  Tokens: loading(() => import("../views/tokens/Tokens.tsx")),
  Compare: loading(() => import("../views/compare/Compare.tsx")),
  Resources: loading(() => import("../views/resources/Resources.tsx")),
  ResourceVersions: loading(() => import("../views/resources/ResourceVersions.tsx")),
  Workers: loading(() => import("../views/workers/Workers.tsx")),
  Settings: loading(() => import("../views/settings/Settings.tsx")),
};

/** Load every view that is not there yet, so that the page goes on without its server. */
export function loadAhead(): void {
  for (const load of Object.values(views)) load().catch(() => undefined);
}
