import { Title } from "@mantine/core";

export function ResourceVersions() {
  return <Title order={1}>ResourceVersions</Title>;
}
