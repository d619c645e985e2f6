// The address after the hash names the view: "#/playground", with parameters as in "#/runs?run=3".
import { signal } from "@preact/signals";

export const VIEWS = [
  { name: "playground", title: "Playground" },
  { name: "chat", title: "Chat" },
  { name: "tree", title: "Prefix tree" },
  { name: "scheduler", title: "Scheduler" },
  { name: "programs", title: "Programs" },
  { name: "runs", title: "Runs" },
] as const;
export type ViewName = (typeof VIEWS)[number]["name"];

export interface Route {
  view: ViewName;
  params: URLSearchParams;
}

export function parseHash(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const view = VIEWS.find((each) => each.name === path)?.name ?? "playground";
  return { view, params: new URLSearchParams(query) };
}

export const route = signal<Route>(parseHash(globalThis.location?.hash ?? ""));

export function hrefOf(view: ViewName, params: Record<string, string> = {}): string {
  const query = new URLSearchParams(params).toString();
  return `#/${view}${query && `?${query}`}`;
}

globalThis.addEventListener?.("hashchange", () => {
  route.value = parseHash(location.hash);
});
