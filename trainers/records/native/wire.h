/* The wire format of tf.train.Example: varints, and what stands before a feature's values.
 *
 * https://protobuf.dev/programming-guides/encoding/
 *   Example = 0A len { 0A len { 0A len key, 12 len { tag len list } } ... }     tag: 0A bytes, 12 float, 1A int64
 */
#ifndef TRAINYARD_WIRE_H
#define TRAINYARD_WIRE_H

#include "bytes.h"
#include "columns.h"

static inline i64 varint_size(u64 x) { return ((64 - __builtin_clzll(x | 1)) * 9 + 64) >> 6; }

static inline u8 *put_varint(u8 *p, u64 x) {
    while (x >= 128) {
        *p++ = (u8)(x | 128);
        x >>= 7;
    }
    *p++ = (u8)x;
    return p;
}

/* The same for values of any size, without a loop where 8 bytes hold it; writes 8 bytes at least. */
static inline u8 *put_value(u8 *p, u64 x, i64 size) {
    if (size > 8) return put_varint(p, x);
    /* Seven bits into each byte, by halves; then the top bit of each byte but the last. */
    x = (x & 0x000000000FFFFFFFu) | (x & 0x00FFFFFFF0000000u) << 4;
    x = (x & 0x00003FFF00003FFFu) | (x & 0x0FFFC0000FFFC000u) << 2;
    x = (x & 0x007F007F007F007Fu) | (x & 0x3F803F803F803F80u) << 1;
    store64(p, x | (0x8080808080808080u & (((u64)1 << (8 * (size - 1))) - 1)));
    return p + size;
}

static const u8 LIST_TAG[3] = {0x12, 0x1A, 0x0A};

/* What stands before `inner` bytes of list message, of which `payload` are behind the list's own head. */
static u8 *put_header(u8 *p, const column *c, u64 payload, int with_head) {
    u64 list = with_head ? payload + 1 + (u64)varint_size(payload) : payload;
    u64 feature = 1 + (u64)varint_size(list) + list;
    u64 key = 1 + (u64)varint_size((u64)c->key_size) + (u64)c->key_size;
    u64 entry = key + 1 + (u64)varint_size(feature) + feature;
    *p++ = 0x0A;
    p = put_varint(p, entry);
    *p++ = 0x0A;
    p = put_varint(p, (u64)c->key_size);
    memcpy(p, c->key, (size_t)c->key_size);
    p += c->key_size;
    *p++ = 0x12;
    p = put_varint(p, feature);
    *p++ = LIST_TAG[c->value];
    p = put_varint(p, list);
    if (with_head) {
        *p++ = 0x0A;
        p = put_varint(p, payload);
    }
    return p;
}

#endif
