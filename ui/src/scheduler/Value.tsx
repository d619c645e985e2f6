// A number that shows where it comes from when it is pointed at or focused.
import { signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Figure } from "./figures";

const shown = signal<{ readonly query: string; readonly at: DOMRect } | null>(null);

export function Value({ figure }: { figure: Figure }) {
  const show = (event: Event): void => {
    shown.value = { query: figure.query, at: (event.currentTarget as Element).getBoundingClientRect() };
  };
  const hide = (): void => {
    shown.value = null;
  };
  return (
    <span
      class="value"
      role="note"
      tabIndex={0}
      aria-label={`${figure.name}: ${figure.text}, from ${figure.query}`}
      onPointerEnter={show}
      onPointerLeave={hide}
      onFocus={show}
      onBlur={hide}
      onKeyDown={(event) => event.key === "Escape" && hide()}
    >
      {figure.text}
    </span>
  );
}

/** The query of the number that is pointed at. Once in a view. */
export function QueryTip() {
  const element = useRef<HTMLDivElement>(null);
  const now = shown.value;
  useLayoutEffect(() => {
    const tip = element.current;
    if (tip === null || now === null) return;
    const { width, height } = tip.getBoundingClientRect();
    const isRoomAbove = now.at.top > height + 16;
    tip.style.left = `${Math.max(8, Math.min(now.at.left, document.documentElement.clientWidth - width - 16))}px`;
    tip.style.top = `${isRoomAbove ? now.at.top - height - 6 : now.at.bottom + 6}px`;
  }, [now]);
  if (now === null) return null;
  return (
    <div ref={element} class="query-tip" aria-hidden="true">
      {now.query}
    </div>
  );
}
