import { Title } from "@mantine/core";

export function Resources() {
  return <Title order={1}>Resources</Title>;
}
