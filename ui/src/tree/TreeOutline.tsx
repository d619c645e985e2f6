// The tree as text: nested items with a roving focus, for screen readers and the keyboard.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { count, counted } from "../charts/numbers";
import type { PrefixNode, PrefixTree } from "./prefixes";
import { stateOf } from "./prefixes";
import { STATE_WORDS } from "./words";

interface Item {
  readonly node: PrefixNode;
  readonly level: number;
  readonly position: number;
  readonly siblings: number;
  readonly isOpen: boolean;
}

interface Props {
  readonly tree: PrefixTree;
  readonly nowS: number;
  readonly focused: number | null;
  readonly onFocus: (id: number) => void;
  readonly texts: ReadonlyMap<number, string>;
  /** Called with the ids of the first items, whose texts are shown. */
  readonly onRoom: (ids: readonly number[]) => void;
}

const MAX_ITEMS = 400;
const OPEN_LEVELS = 2;
const MAX_TEXTS = 60;

/** The items in their order, without those below closed nodes. `toggled`: nodes that are not as they are at first:
 * the first levels open, deeper ones closed. */
export function itemsOf(root: PrefixNode, toggled: ReadonlySet<number>, most: number): [Item[], boolean] {
  const items: Item[] = [];
  const waiting = childrenOf(root, 1);
  while (waiting.length > 0 && items.length < most) {
    const next = waiting.pop() as Omit<Item, "isOpen">;
    const isOpen = next.node.children.length > 0 && next.level <= OPEN_LEVELS !== toggled.has(next.node.id);
    items.push({ ...next, isOpen });
    if (isOpen) waiting.push(...childrenOf(next.node, next.level + 1));
  }
  return [items, waiting.length > 0];
}

function childrenOf(node: PrefixNode, level: number): Omit<Item, "isOpen">[] {
  const siblings = node.children.length;
  return node.children.map((child, i) => ({ node: child, level, position: i + 1, siblings })).reverse();
}

export function TreeOutline({ tree, nowS, focused, onFocus, texts, onRoom }: Props) {
  const [toggled, setToggled] = useState<ReadonlySet<number>>(new Set());
  const list = useRef<HTMLDivElement>(null);
  const hasFocus = useRef(false);
  const [items, hasMore] = itemsOf(tree.root, toggled, MAX_ITEMS);
  const at = Math.max(
    0,
    items.findIndex(({ node }) => node.id === focused),
  );
  const wanted = items.slice(Math.max(0, at - MAX_TEXTS / 2)).slice(0, MAX_TEXTS);
  useEffect(() => onRoom(wanted.map(({ node }) => node.id)), [wanted.map(({ node }) => node.id).join()]);
  useLayoutEffect(() => {
    if (hasFocus.current) list.current?.querySelector<HTMLElement>('[tabindex="0"]')?.focus();
  }, [focused]);
  const toggle = (node: PrefixNode): void => {
    const next = new Set(toggled);
    if (!next.delete(node.id)) next.add(node.id);
    setToggled(next);
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const item = items[at];
    if (item === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = targetOf(items, at, event.key);
    if (to !== null) onFocus((items[to] as Item).node.id);
    else if (
      (event.key === "ArrowRight" && !item.isOpen && item.node.children.length > 0) ||
      (event.key === "ArrowLeft" && item.isOpen) ||
      event.key === "Enter" ||
      event.key === " "
    ) {
      toggle(item.node);
    } else return;
    event.preventDefault();
  };
  return (
    <>
      <div
        ref={list}
        class="tree-outline"
        role="tree"
        aria-label="Prefix tree"
        onKeyDown={onKeyDown}
        onFocusIn={() => (hasFocus.current = true)}
        onFocusOut={() => (hasFocus.current = false)}
      >
        {items.map((item, i) => {
          const { node, level } = item;
          const state = stateOf(node, nowS);
          const text = texts.get(node.id);
          return (
            <div
              key={node.id}
              role="treeitem"
              class={`tree-item is-${state}`}
              tabIndex={i === at ? 0 : -1}
              aria-level={level}
              aria-posinset={item.position}
              aria-setsize={item.siblings}
              aria-selected={node.id === focused}
              aria-expanded={node.children.length > 0 ? item.isOpen : undefined}
              style={{ paddingInlineStart: `${Math.min(level - 1, 12) * 1.1 + 0.4}rem` }}
              onClick={() => {
                onFocus(node.id);
                if (node.id === focused) toggle(node);
              }}
            >
              <span class={node.children.length > 0 ? "tree-twist" : "tree-leaf"} aria-hidden="true" />
              <span class="tree-tokens">
                {count(node.numTokens)}
                <span class="visually-hidden"> {node.numTokens === 1 ? "token" : "tokens"}, </span>
              </span>
              <span class={`tree-state is-${state}`}>{STATE_WORDS[state]}</span>
              <bdi class="tree-text">{text ?? ""}</bdi>
              <span class="visually-hidden">{moreAbout(node)}</span>
            </div>
          );
        })}
      </div>
      {hasMore && (
        <p class="tree-note">
          The outline shows its first {count(MAX_ITEMS)} nodes: close some to see others.
        </p>
      )}
    </>
  );
}

/** What screen readers say after what the item shows. */
function moreAbout(node: PrefixNode): string {
  const parts: string[] = [];
  if (node.numGenerated > 0) parts.push(`${count(node.numGenerated)} generated`);
  if (node.children.length > 0) parts.push(counted(node.children.length, "continuation"));
  return parts.map((part) => `, ${part}`).join("");
}

/** The item to which a key moves the focus; null if the key does something else. */
function targetOf(items: readonly Item[], at: number, key: string): number | null {
  const item = items[at] as Item;
  switch (key) {
    case "ArrowDown":
      return Math.min(at + 1, items.length - 1);
    case "ArrowUp":
      return Math.max(at - 1, 0);
    case "Home":
      return 0;
    case "End":
      return items.length - 1;
    case "ArrowRight":
      return item.isOpen ? at + 1 : null;
    case "ArrowLeft": {
      if (item.isOpen) return null;
      const parent = items.findIndex(({ node }) => node.id === item.node.parent);
      return parent >= 0 ? parent : null;
    }
    default:
      return null;
  }
}
