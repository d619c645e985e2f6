// A reply as markdown. While it streams it is rendered again only so often that it takes a tenth of the time.
import { useLayoutEffect, useRef } from "preact/hooks";
import { showMarkdown } from "../text/markdown";

const LEAST_PAUSE_MS = 200;

/** `subscribe` calls back when `text` may have changed, and returns what ends that. */
export function MarkdownText(props: { text: () => string; subscribe?: (changed: () => void) => () => void }) {
  const host = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let pause = LEAST_PAUSE_MS;
    let shown: string | null = null;
    const show = (): void => {
      timer = undefined;
      const text = props.text();
      const element = host.current;
      if (!element || text === shown) return;
      shown = text;
      const start = performance.now();
      showMarkdown(element, text, !props.subscribe); // while it streams, buttons would be replaced under the pointer
      pause = Math.max(LEAST_PAUSE_MS, 10 * (performance.now() - start));
    };
    show();
    const end = props.subscribe?.(() => {
      timer ??= setTimeout(show, pause);
    });
    return () => {
      clearTimeout(timer);
      end?.();
    };
  }, [props.text, props.subscribe]);
  return <div ref={host} class="markdown model-text" dir="auto" />;
}
