// Every checksum kernel gives the same checksums, whole and in pieces, at any address.

#include <algorithm>
#include <array>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "base/checksums/checksum_kernel.hpp"
#include "harness.hpp"

namespace dsh::test {
namespace {

Digest whole(const ChecksumKernel &kernel, const std::byte *data, std::size_t nbytes) {
    Digest digest;
    kernel.whole(data, nbytes, digest.data());
    return digest;
}

Digest in_pieces(const ChecksumKernel &kernel, const std::byte *data, std::size_t nbytes, Random &random) {
    alignas(64) std::byte state[checksum_state_bytes];
    kernel.begin(state);
    for (std::size_t at = 0; at < nbytes;) {
        const std::size_t piece = std::min<std::size_t>(nbytes - at, random.between(1, 3000));
        kernel.add(state, data + at, piece);
        at += piece;
    }
    Digest digest;
    kernel.end(state, digest.data());
    return digest;
}

} // namespace

TEST(checksum_kernels_agree) {
    Random random(3);
    std::vector<std::byte> bytes(20'000);
    for (std::byte &byte : bytes) {
        byte = static_cast<std::byte>(random.between(0, 255));
    }
#ifdef __x86_64__
    const std::array kernels = {&portable_checksum, &avx2_checksum, &avx512_checksum};
#else
    const std::array kernels = {&portable_checksum};
#endif
    for (std::size_t turn = 0; turn < 400; ++turn) {
        const std::size_t nbytes = turn < 300 ? turn : random.between(300, bytes.size() - 64);
        const std::byte *data = bytes.data() + random.between(0, 63);
        const Digest expected = checksum(data, nbytes);
        for (const ChecksumKernel *kernel : kernels) {
            if (kernel->works()) {
                CHECK(whole(*kernel, data, nbytes) == expected);
                CHECK(in_pieces(*kernel, data, nbytes, random) == expected);
            }
        }
    }
}

} // namespace dsh::test
