/** What a view shows when it has nothing to show: loading, empty, denied, gone, failed. */

import { Alert, Anchor, Button, Center, Loader, Stack, Text } from "@mantine/core";
import { Link } from "@tanstack/react-router";
import type { UseQueryResult } from "@tanstack/react-query";
import type { ReactNode } from "react";

import { ApiError } from "../api/client.ts";
import { named } from "../pure/visible.ts";

export function Loading({ what }: { what: string }) {
  return (
    <Center mih={160} role="status" aria-live="polite">
      <Stack align="center" gap="xs">
        <Loader size="sm" aria-hidden />
        <Text size="sm" c="dimmed">
          Loading {what}
        </Text>
      </Stack>
    </Center>
  );
}

export function Empty({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <Center mih={160} data-state="empty">
      <Stack align="center" gap="xs" maw={560}>
        <Text fw={600}>{title}</Text>
        {children}
      </Stack>
    </Center>
  );
}

export function Missing({ what, message }: { what: string; message?: string }) {
  return (
    <Empty title={`${named(what)} is not in this store`}>
      {message ? (
        <Text size="sm" className="agl-text">
          {named(message, 1000)}
        </Text>
      ) : null}
      <Text size="sm" c="dimmed">
        It may have been deleted by the store's retention policy, or the link may be for another store.
      </Text>
      <Anchor component={Link} to="/runs" size="sm">
        All runs
      </Anchor>
    </Empty>
  );
}

export function Failure({ error, retry, what }: { error: unknown; retry?: () => void; what: string }) {
  if (error instanceof ApiError && (error.kind === "missing" || error.kind === "gone")) {
    return <Missing what={what} message={error.message} />;
  }
  const denied = error instanceof ApiError && error.kind === "denied";
  const text = error instanceof Error ? error.message : String(error);
  return (
    <Alert
      role="alert"
      color="orange"
      title={denied ? "The server requires a token" : `${what}: request failed`}
      data-state={denied ? "denied" : "error"}
    >
      <Stack gap="xs" align="flex-start">
        <Text size="sm" className="agl-text">
          {named(text, 1000)}
        </Text>
        {denied ? (
          <Anchor component={Link} to="/settings" size="sm">
            Enter the token in Settings (the value of AGL_TOKEN on the server)
          </Anchor>
        ) : null}
        {retry ? (
          <Button size="xs" variant="default" onClick={retry}>
            Try again
          </Button>
        ) : null}
      </Stack>
    </Alert>
  );
}

/** Show a query's answer, or why there is none. `null` from the server is an unknown id. */
export function Answer<T>({
  query,
  what,
  children,
}: {
  query: UseQueryResult<T>;
  what: string;
  children: (answer: NonNullable<T>) => ReactNode;
}) {
  if (query.data !== undefined && query.data !== null) return <>{children(query.data)}</>;
  if (query.isPending) return <Loading what={what} />;
  if (query.isError) return <Failure error={query.error} retry={() => void query.refetch()} what={what} />;
  return <Missing what={what} />;
}
