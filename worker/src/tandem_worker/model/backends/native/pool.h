// Threads that help with the items of a job, as far as they are awake and have a core.
//
// A job is done when its items are, not when every thread has come by: on a core that other processes want too, a
// helper may be away for milliseconds, and a region that waits for it at a barrier, as OpenMP's do, waits as long. Each
// thread begins with a share of neighbouring items, whose memory is read in one run, and then takes what others have left.
#pragma once

#include "simd.h"

namespace tandem {

using Body = void (*)(void* context, Index item);

// Calls `body` once for each item from 0 to `count`, less than 2^31, in any order and on several threads; returns when
// all calls have. While another thread runs a job, the caller's runs on its own thread alone.
void run_items(Index count, Body body, void* context);

template <class Function>
void for_each_item(Index count, Function function) {
    run_items(
        count, [](void* context, Index item) { (*static_cast<Function*>(context))(item); }, &function);
}

// Items of about `per_item` out of `count` elements, as `function(first, last)`.
template <class Function>
void for_each_run(Index count, Index per_item, Function function) {
    for_each_item((count + per_item - 1) / per_item, [&](Index item) {
        const Index first = item * per_item;
        function(first, first + per_item < count ? first + per_item : count);
    });
}

}  // namespace tandem
