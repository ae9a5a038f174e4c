/**
 * The addresses of the page. All state that a colleague needs to see the same lies in the address: routes and their
 * search parameters stand behind `#`, so the server has one page only and a proxy may put it below any path.
 */

import {
  createHashHistory,
  createRootRoute,
  createRoute,
  createRouter,
  lazyRouteComponent,
} from "@tanstack/react-router";

import { Failure, Missing } from "../parts/States.tsx";
import { parseSearch, stringifySearch } from "../pure/address.ts";
import { Shell } from "./Shell.tsx";
import { views } from "./views.ts";

/** Search parameters as they stand in the address, all of them texts; each view reads those it knows. */
export type Search = Record<string, string | undefined>;

const root = createRootRoute({ component: Shell, notFoundComponent: () => <Missing what="This address" /> });
const anySearch = { validateSearch: (search: Search): Search => search };

const home = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/",
  component: lazyRouteComponent(views.Runs, "Runs"),
});
const runs = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/runs",
  component: lazyRouteComponent(views.Runs, "Runs"),
});
const run = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/runs/$runId",
  component: lazyRouteComponent(views.RunOverview, "RunOverview"),
});
const group = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/runs/$runId/steps/$step/groups/$task",
  component: lazyRouteComponent(views.Group, "Group"),
});
const rollouts = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/rollouts",
  component: lazyRouteComponent(views.Rollouts, "Rollouts"),
});
const rollout = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/rollouts/$rolloutId",
  component: lazyRouteComponent(views.RolloutPage, "RolloutPage"),
});
const compare = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/compare",
  component: lazyRouteComponent(views.Compare, "Compare"),
});
const resources = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/resources",
  component: lazyRouteComponent(views.Resources, "Resources"),
});
const resource = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/resources/$resourcesId",
  component: lazyRouteComponent(views.ResourceVersions, "ResourceVersions"),
});
const workers = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/workers",
  component: lazyRouteComponent(views.Workers, "Workers"),
});
const settings = createRoute({
  ...anySearch,
  getParentRoute: () => root,
  path: "/settings",
  component: lazyRouteComponent(views.Settings, "Settings"),
});

export const router = createRouter({
  routeTree: root.addChildren([
    home,
    runs,
    run,
    group,
    rollouts,
    rollout,
    compare,
    resources,
    resource,
    workers,
    settings,
  ]),
  history: createHashHistory(),
  parseSearch,
  stringifySearch,
  defaultPreload: "intent",
  defaultErrorComponent: ({ error, reset }) => <Failure error={error} retry={reset} what="This view" />,
  scrollRestoration: true,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
