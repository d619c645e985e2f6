// The bytes of the page's pictures: in memory, and in the tab's session storage as far as there is room.
//
// A view's own data has pictures without their bytes (`ShownImage`). After a reload, those whose bytes were not
// stored are lost: they are shown, and cannot be sent.
import { image, type Image } from "agentflow-client";
import { effect, signal } from "@preact/signals";
import { store, stored } from "../app/stored";
import type { ShownImage } from "./picture";

const PREFIX = "image 1";
/** Half of what browsers store for an origin: chats and programs need room, too. */
const MAX_STORED_CHARS = 2_500_000;

const held = new Map<string, Image>();
/** The names under which pictures are stored, with the length of what is. */
const entries = new Map<string, number>();
/** The pictures of each owner for which storage has no room. */
const withoutRoom = signal<ReadonlyMap<string, ReadonlySet<string>>>(new Map());
/** The pictures in use, by owner: also of a view that was not opened since the reload, and of open fields. */
const wantedBy = new Map<unknown, ReadonlySet<string>>();
/** Fields that were closed. */
const closed = new WeakSet<object>();
/** Grows when a picture is added to `held`. */
const numAdded = signal(0);

/** The picture with this source; undefined if it was lost. */
export function imageOf(source: string): Image | undefined {
  void numAdded.value;
  return held.get(source);
}

/** Takes a picture, at least until the owner lets go of it. */
export function holdImage(made: Image, owner: unknown): void {
  wantedBy.set(owner, new Set([...(wantedBy.get(owner) ?? []), made.source]));
  held.set(made.source, made);
  numAdded.value++;
}

/** The same for a field. One that was closed while the picture was read holds it only until others could take it. */
export function holdForField(made: Image, field: object): void {
  holdImage(made, field);
  if (closed.has(field)) queueMicrotask(() => closeField(field));
}

/** The field is closed: what it held is forgotten, unless others use it. */
export function closeField(field: object): void {
  closed.add(field);
  if (wantedBy.delete(field)) forgetUnused();
}

function forgetUnused(): void {
  const wanted = new Set([...wantedBy.values()].flatMap((sources) => [...sources]));
  for (const source of held.keys()) if (!wanted.has(source)) held.delete(source);
}

export const isLost = ({ source }: ShownImage) => imageOf(source) === undefined;

/** Whether the picture will be lost with a reload of the page. */
export const isWithoutRoom = ({ source }: ShownImage) => [...withoutRoom.value.values()].some((one) => one.has(source));

/** Stores the pictures that `used` returns. Those that it returns no longer are forgotten, unless others use them. */
export function keepImages(owner: string, used: () => Iterable<ShownImage>): void {
  const own = `${PREFIX} ${owner} `;
  effect(() => {
    void numAdded.value;
    const wanted = new Set(Array.from(used(), ({ source }) => source));
    wantedBy.set(owner, wanted);
    forgetUnused();
    for (const name of entries.keys()) {
      if (!name.startsWith(own) || wanted.has(name.slice(own.length))) continue;
      store(name, undefined);
      entries.delete(name);
    }
    for (const source of wanted) {
      const [name, made] = [own + source, held.get(source)];
      if (!made || entries.has(name)) continue;
      const length = name.length + Math.ceil(made.data!.length / 3) * 4;
      const total = [...entries.values()].reduce((sum, one) => sum + one, length);
      if (total <= MAX_STORED_CHARS && store(name, made.url)) entries.set(name, length);
    }
    const left = new Set([...wanted].filter((source) => held.has(source) && !entries.has(own + source)));
    withoutRoom.value = new Map(withoutRoom.peek()).set(owner, left);
  });
}

async function restore(): Promise<void> {
  let names: string[] = [];
  try {
    names = Object.keys(sessionStorage);
  } catch {
    return; // storage may be forbidden
  }
  for (const name of names.filter((one) => one.startsWith(`${PREFIX} `))) {
    try {
      const url = stored(name) as string;
      holdImage(await image(url), name.split(" ")[2]!);
      entries.set(name, name.length + url.length);
    } catch {
      store(name, undefined);
    }
  }
}

await restore();
