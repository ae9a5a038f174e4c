/** The values of the store's interface, by their names there. */

import type { components } from "./schema.d.ts";

type Schemas = components["schemas"];

export type Run = Schemas["Run"];
export type RunRecord = Schemas["RunRecord"];
export type Rollout = Schemas["Rollout"];
export type AttemptedRollout = Schemas["AttemptedRollout"];
export type Attempt = Schemas["Attempt"];
export type Span = Schemas["Span"];
export type Worker = Schemas["Worker"];
export type ResourcesUpdate = Schemas["ResourcesUpdate"];

export interface Page<T> {
  items: T[];
  total: number;
  limit: number;
  offset: number;
}
