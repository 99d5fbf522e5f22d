// Carries out allocations and frees in torch's own CUDACachingAllocator, and tells what it has after each.
//
// Reads lines: `a NAME BYTES STREAM` allocates, `f NAME` frees, `e` empties the cache, `s` tells all segments with
// their blocks. Answers each of the others with requested, allocated and reserved bytes and the number of retries; with `oom`
// before them where there was no memory. What has none is not freed.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <iostream>
#include <string>
#include <unordered_map>

namespace own = c10::cuda::CUDACachingAllocator;

static void segments() {
  for (const auto& segment : own::get()->snapshot({0, 0}, false).segments) {
    std::cout << segment.address << ' ' << segment.total_size << ' ' << reinterpret_cast<size_t>(segment.stream) << ' '
              << !segment.is_large;
    for (const auto& block : segment.blocks)
      std::cout << ' ' << block.size << ':' << (block.allocated ? block.requested_size : 0);
    std::cout << '\n';
  }
  std::cout << "." << std::endl;
}

int main() {
  c10::cuda::detail::init_p2p_access_cache(1);
  own::get()->init(1);
  std::unordered_map<long, void*> living;
  std::string what;
  while (std::cin >> what) {
    long name = 0;
    size_t bytes = 0, stream = 0;
    if (what == "s") {
      segments();
      continue;
    }
    if (what == "e") own::get()->emptyCache();
    if (what == "f" && std::cin >> name && living.count(name)) {
      own::get()->raw_delete(living.at(name));
      living.erase(name);
    }
    if (what == "a" && std::cin >> name >> bytes >> stream) {
      try {
        living[name] = own::get()->raw_alloc_with_stream(bytes, reinterpret_cast<cudaStream_t>(stream));
      } catch (const c10::OutOfMemoryError&) {
        std::cout << "oom ";
      }
    }
    const auto told = own::get()->getDeviceStats(0);
    std::cout << told.requested_bytes[0].current << ' ' << told.allocated_bytes[0].current << ' '
              << told.reserved_bytes[0].current << ' ' << told.num_alloc_retries << '\n';
  }
}
